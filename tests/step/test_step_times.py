"""What the engine knows about the seconds of a step: profiled with and without a context, corrected by real steps."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from helpers import tiny
from jaxspec import SamplingParams
from jaxspec.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def engine(**changes: object) -> LLM:
    return tiny.llm(
        **dict(
            page_size=16, max_num_seqs=4, token_buckets=[1, 16, 64], max_num_batched_tokens=64, kv_cache_tokens=1024,
            max_model_len=128, draft=[], compilation_cache_dir="", enable_prefix_caching=True, **changes,
        )
    )  # fmt: skip


def test_two_sizes_are_profiled_with_a_context() -> None:
    with engine() as llm:
        runner = llm.engine.loop.model_runner
        assert set(runner.step_seconds) == {1, 16, 64} == set(runner.times.sizes)
        assert {plain for _, plain in runner._reading} == {"1", "64"} and all(runner._reading.values())
        for name, size in (("1", 4.0), ("64", 6.0)):
            (reading,) = (reading for reading, plain in runner._reading if plain == name)
            runner.profile.seconds[name] = 0.5
            runner.profile.seconds[reading] = 0.5 + size
        assert runner.position_seconds == pytest.approx(10.0 / sum(runner._reading.values()))
        runner.profile.seconds["64"] = 100.0
        assert runner.position_seconds == 0.0, "noise never makes a longer context faster"
        runner.profile.on_measured[-1]()
        assert runner.times.position == 0.0 and runner.times.of(64, 10**6) == 100.0


def test_a_run_that_reads_positions_leaves_the_kv_as_it_was() -> None:
    """It may run between requests, whose prefixes are in the pages that it reads."""
    prompt = list(range(1, 50))
    with engine() as llm:
        runner = llm.engine.loop.model_runner
        (first,) = llm.generate([prompt], GREEDY)
        before = jax.device_get(runner.kv_cache)
        for run in runner.profile._runs.values():
            run()
        for old, new in zip(before, jax.device_get(runner.kv_cache), strict=True):
            np.testing.assert_array_equal(old, new)
        (again,) = llm.generate([prompt], GREEDY)
        assert again.metrics.cached_tokens and again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("changes", [{"kv_cache_dtype": "int8"}, {"max_model_len": 16}])
def test_where_no_context_can_be_profiled_it_costs_nothing(changes: dict[str, object]) -> None:
    settings = {"kv_cache_dtype": "auto", "max_model_len": 128} | changes
    with tiny.llm(
        page_size=16, max_num_seqs=2, token_buckets=[16], max_num_batched_tokens=16, kv_cache_tokens=256, draft=[],
        compilation_cache_dir="", **settings,
    ) as llm:  # fmt: skip
        assert llm.engine.step_times.position == 0.0


def test_observed_steps_carry_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as llm:
        seen: list[int] = []
        times = llm.engine.loop.model_runner.times
        monkeypatch.setattr(times, "observe", lambda tokens, seconds, context: seen.append(context))
        llm.generate([[5] * 20], GREEDY)
        assert seen == [0, *range(20, 27)]
