"""Calls that the engine's thread makes between two steps."""

from __future__ import annotations

import threading

import pytest

from helpers import tiny
from helpers.generation import GREEDY
from helpers.patience import PATIENCE
from jaxspec.errors import EngineDead
from jaxspec.sched.routing import report_of


def test_calls_are_made_in_the_engines_thread_until_it_stops() -> None:
    with tiny.llm(
        draft=[], max_num_seqs=2, kv_cache_tokens=512, token_buckets=[1, 16], compilation_cache_dir=""
    ) as llm:
        engine = llm.engine
        thread = engine.between_steps(lambda _: threading.current_thread().name).result(PATIENCE)
        assert thread == "jaxspec-engine"
        with pytest.raises(ZeroDivisionError):
            engine.between_steps(lambda _: 1 // 0).result(PATIENCE)
        assert llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids == tiny.greedy([1, 2], 12), "it goes on"
        report = engine.between_steps(lambda loop: report_of(loop.scheduler, 1.0)).result(PATIENCE)
        assert (report.time, report.requests, report.slots) == (1.0, 0, 2)
        engine.submit([3], GREEDY, lambda _: None)
        report = engine.between_steps(lambda loop: report_of(loop.scheduler, 2.0)).result(PATIENCE)
        assert report.requests <= 1
    with pytest.raises(EngineDead, match="shut down"):
        engine.between_steps(lambda _: None).result(PATIENCE)
