"""One tree of what several drafters propose: its nodes, who drafts, and who learns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.candidate_trees import SEEDS, random_candidates
from helpers.fake_drafter import STEP, Fake, requests, round_of
from jaxspec.sched.spec.merging import Part, merged
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.chain import Chain
from jaxspec.sched.spec.trees.sampled import SampledTree
from jaxspec.sched.timing import StepTimes

#: Steps of up to 16 tokens take the same time, so that all nodes pay.
FLAT = StepTimes({1: 10e-3, 16: 10e-3, 64: 40e-3})


class Free(Fake):
    free = True


class Unsure(Free):
    """Another drafter should do better."""

    stated = 0.3


def paths(candidates: Candidates) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    out: list[tuple[int, ...]] = []
    for token, parent in zip(candidates.token.tolist(), candidates.parent.tolist(), strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return out


@settings(deadline=None, max_examples=100)
@given(SEEDS, st.lists(st.integers(0, 12), min_size=1, max_size=3))
def test_nodes_with_the_same_path_are_one(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_candidates(rng, size) for size in sizes]
    for c in trees:
        c.token[:] %= 3  # so that many paths are the same
    tree, nodes = merged(trees)
    of_tree = paths(tree)
    assert len(set(of_tree)) == len(of_tree)
    highest: dict[tuple[int, ...], float] = {}
    for c, node in zip(trees, nodes, strict=True):
        assert [of_tree[i] for i in node] == paths(c)
        for path, logprob in zip(paths(c), c.logprob.tolist(), strict=True):
            highest[path] = max(logprob, highest.get(path, -np.inf))
    assert [highest[path] for path in of_tree] == tree.logprob.tolist()
    assert all(parent < i for i, parent in enumerate(tree.parent.tolist()))


def test_a_part_knows_its_own_nodes() -> None:
    a, b = (
        Candidates(np.array(t, np.int32), np.array([-1, 0], np.int32), np.log([0.5, 0.2])) for t in ([1, 2], [1, 3])
    )
    tree, (of_a, of_b) = merged([a, b])
    assert paths(tree) == [(1,), (1, 2), (1, 3)]
    chosen = np.array([True, True, False])
    mask, path = Part(1, b, of_b, 1).of_merged(chosen, [0, 1])
    assert mask.tolist() == [True, False] and path == [0]
    assert Part(0, a, of_a, 1).of_merged(np.ones(3, bool), [0, 1])[1] == [0, 1]
    assert Part(0, a, of_a, 1).of_merged(chosen, [])[1] == []
    empty = Candidates(b.token, b.parent, np.array([-0.5, -np.inf]))
    mask, path = Part(1, empty, of_b, 1).of_merged(np.ones(3, bool), [0, 2])
    assert mask.tolist() == [True, False] and path == [0]


def test_free_candidates_are_merged_with_those_of_another_drafter() -> None:
    free, other = Unsure("free", 100, 0, ["0", "1"]), Fake("other", 200, 1e-6, ["0", "2"])
    speculator, running = Speculator([other, free], FLAT), requests(3)
    assert round_of(speculator, running) == {"0": 100, "1": 100, "2": 200}
    drafted = speculator.drafted
    assert [[p.drafter for p in drafted[name].parts] for name in "012"] == [[1, 0], [1], [0]]
    assert {100, 200} <= set(drafted["0"].draft.token.tolist())


def test_each_drafter_learns_from_its_own_nodes() -> None:
    free, other = Unsure("free", 100, 0, ["0"]), Fake("other", 200, 1e-6, ["0"])
    speculator, running = Speculator([other, free], FLAT), requests(1)
    round_of(speculator, running)
    draft = speculator.drafted["0"].draft
    (right,) = np.flatnonzero((draft.token == 200) & (draft.depth == 1))
    speculator.observe(running[0], [int(right)])
    of_other, of_free = (speculator._record(running[0], i) for i in range(2))
    assert of_free.expected > of_free.accepted and of_other.accepted > of_free.accepted


def test_another_drafter_is_not_asked_where_the_free_nodes_are_better() -> None:
    free, other = Free("free", 100, 0, ["0"]), Fake("other", 200, 1e-6, ["0", "1"])
    speculator, running = Speculator([other, free], FLAT), requests(2)
    for _ in range(30):  # the other one is bad for request 0
        speculator._record(running[0], 0).observe(2.0, 0)
    assert round_of(speculator, running) == {"0": 100, "1": 200}
    assert [p.drafter for p in speculator.drafted["0"].parts] == [1]


def test_nothing_is_free_where_no_node_pays() -> None:
    """Each token makes these steps as much longer as it can be worth."""
    dear = StepTimes({n: 1e-3 * n for n in range(1, 65)})
    assert dear.least_chance(1) == pytest.approx(1.0) and FLAT.least_chance(4) == 0.0
    free = Free("free", 100, 0, ["0"])
    assert round_of(Speculator([free], FLAT), requests(1)) == {"0": 100}
    assert round_of(Speculator([free], dear), requests(1)) == {}


def test_free_nodes_that_were_wrong_are_tried_again() -> None:
    """Once in a while, one node; when they turn out right, all are verified again."""
    free, running = Free("free", 100, 0, ["0", "1"]), requests(2)
    speculator = Speculator([free], StepTimes({n: 8e-3 + 4e-3 * n for n in range(1, 65)}))

    def steps(count: int, right: bool) -> list[int]:
        drafted: list[int] = []
        for _ in range(count):
            ids = round_of(speculator, running)
            drafted.append(sum(len(speculator.drafted[id].draft) for id in ids))
            for id in ids:
                speculator.observe(running[int(id)], range(len(speculator.drafted[id].draft)) if right else ())
        return drafted

    steps(200, right=False)
    assert 1 <= sum(steps(260, right=False)) <= 4
    assert steps(2000, right=True)[-1] >= 8


def test_a_probe_is_not_mixed_with_free_nodes() -> None:
    free, other = Free("free", 100, 0, ["0"]), Fake("other", 200, 1e-4, ["0"])
    speculator, running = Speculator([other, free], STEP), requests(1)
    probes = 0
    for _ in range(400):
        first = round_of(speculator, running)
        drafted = speculator.drafted.get("0")
        if speculator.controllers[0].probing:
            probes += 1
            assert first == {"0": 200} and drafted is not None and [p.drafter for p in drafted.parts] == [0]
        speculator.observe(running[0], ())
    assert probes > 0


@pytest.mark.parametrize(("policy", "drafters"), [(Chain(2), [1, 0]), (SampledTree(2), [0])])
def test_random_draws_are_not_merged(policy: Chain | SampledTree, drafters: list[int]) -> None:
    free, other = Unsure("free", 100, 0, ["0"]), Fake("other", 200, 1e-6, ["0"])
    speculator, running = Speculator([other, free], FLAT, policy, levels=2), requests(1)
    round_of(speculator, running)
    assert [p.drafter for p in speculator.drafted["0"].parts] == drafters
