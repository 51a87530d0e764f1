"""Prompts that share blocks, and the traces that say so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.ledger import Ledger
from jaxspec.sched.sim.prompts import Prompts, shared
from jaxspec.sched.sim.workload import Workload, join


def test_prompts_are_the_same_where_their_blocks_are() -> None:
    prompts = Prompts([(5, 6), (5, 7), (8,)], 4)
    assert prompts.tokens(0, 7) == [6] * 4 + [7] * 3
    assert prompts.tokens(1, 5) == [6] * 4 + [8]
    with pytest.raises(ValueError, match="request 2 has 5 prompt tokens, but blocks for 4"):
        prompts.tokens(2, 5)
    for blocks, size in (([(-1,)], 4), ([(2**32,)], 4), ([(1,)], 0)):
        with pytest.raises(ValueError, match="block"):
            Prompts(blocks, size)


def test_shared_prefixes_come_before_prompts_of_their_own() -> None:
    inputs, prompts = shared([3, 9, 4] * 40, 4, 8, np.random.default_rng(0))
    assert inputs.tolist() == [11, 17, 12] * 40
    tokens = [prompts.tokens(i, n) for i, n in enumerate(inputs.tolist())]
    groups = [tuple(one[:8]) for one in tokens]
    assert len(set(groups)) == 4 and groups.count((1,) * 8) > groups.count((4,) * 8)
    own = [token for one in tokens for token in set(one[8:])]
    assert len(own) == len(set(own)) and not set(own) & {1, 2, 3, 4}
    for wrong in ((0, 8), (4, 0)):
        with pytest.raises(ValueError, match="at least one"):
            shared([3], *wrong, np.random.default_rng(0))


def test_a_trace_with_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [(500, 600, 3, [1, 2]), (0, 512, 5, [1]), (1500, 20, 1, [9])]
    names = "timestamp", "input_length", "output_length", "hash_ids"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    found = arrivals.trace(path)
    assert [(a.time, a.input_tokens, a.output_tokens, a.blocks) for a in found] == [
        (0.0, 512, 5, (1,)), (0.5, 600, 3, (1, 2)), (1.5, 20, 1, (9,)),
    ]  # fmt: skip
    assert [a.time for a in arrivals.trace(path, 2, rate=1.0)] == [0.0, 1.0]
    work = join(arrivals.part(found, 5, 2.0, np.random.default_rng(0)), None, 1, np.random.default_rng(0))
    ledger = Ledger(work, 1000)
    for i in range(5):
        request = ledger.request(i)
        assert request.prompt_len == len(request.tokens) and request.tokens[0] in (2, 10)
    # Lengths of a table say nothing of what prompts share.
    path.write_text('{"timestamp": 0}')
    with pytest.raises(ValueError, match=r"line 1: has no timestamp"):
        arrivals.trace(path)


def test_a_workload_has_a_prompt_for_each_request() -> None:
    one = np.ones(1)
    with pytest.raises(ValueError, match="prompts has 2 rows for 1 arrivals"):
        Workload(one, one.astype(int), one.astype(int), one, prompts=Prompts([(1,), (2,)], 4))
