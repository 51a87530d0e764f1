"""The simulated H200: its times, the fit of EAGLE-3's acceptance, and what drafts gain there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jaxspec.bench.papers import gpu
from jaxspec.bench.papers.eagle3 import FITTED, PUBLISHED, Tasks, acceptance_length, fitted, process
from jaxspec.bench.papers.gpu import Case, sections, serve, simulated
from jaxspec.bench.papers.runs import Runs
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.sim.cost import LLAMA_3_8B_H200, PAPER_SCALE, StepLoad, load_cost, step_times
from jaxspec.sched.sim.draft_cost import EAGLE3_8B_H200, draft_cost
from jaxspec.sched.sim.drafter import SimulatedDrafter


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens than on the page."""
    monkeypatch.setattr(gpu, "MEASURED", 96)
    monkeypatch.setattr(gpu, "LEAST", 768)


# -- times -------------------------------------------------------------------------------------------------------------


def test_the_rooflines_are_those_of_the_data_sheet() -> None:
    cost = load_cost("llama-3.1-8b-h200")
    assert cost is LLAMA_3_8B_H200.cost is PAPER_SCALE["llama-3.1-8b-h200"]
    read = 15.0e9 / (0.8 * 4.8e12)
    assert cost.seconds(StepLoad(1)) == pytest.approx(read + 0.2e-3)
    assert cost.seconds(StepLoad(1)) == pytest.approx(4.1e-3, rel=0.01)
    ridge = 0.5 * 989e12 / (0.8 * 4.8e12)
    assert 128 < ridge < 129 and step_times(cost, 2048).verify_budget() == 136, "rounded up to a sampled size"
    assert cost.seconds(StepLoad(256)) == pytest.approx(256 / ridge * read + 0.2e-3)
    longer = cost.seconds(StepLoad(256, context=10**6)) - cost.seconds(StepLoad(256))
    assert longer == pytest.approx(131_072 * 10**6 / (0.8 * 4.8e12))
    assert step_times(cost, 2048).of(256, 10**6) == pytest.approx(cost.seconds(StepLoad(256, context=10**6)))
    assert LLAMA_3_8B_H200.positions == pytest.approx(838_000, rel=0.01)


def test_a_round_of_eagle3_takes_a_layer_and_its_head_per_level() -> None:
    assert draft_cost(LLAMA_3_8B_H200.cost) is EAGLE3_8B_H200
    assert EAGLE3_8B_H200.seconds(1, 2, 8, 4) == pytest.approx(8 * (0.1e-3 + 0.748e9 / (0.8 * 4.8e12)), rel=0.01)
    longer = EAGLE3_8B_H200.seconds(1, 2, 8, 4, 10**6) - EAGLE3_8B_H200.seconds(1, 2, 8, 4)
    assert longer == pytest.approx(8 * 4096 * 10**6 / (0.8 * 4.8e12))


def test_estimated_rounds_follow_the_contexts_that_they_leave_out() -> None:
    drafter = SimulatedDrafter(process(Tasks(), 4), [100] * 64, EAGLE3_8B_H200, np.random.default_rng(0))
    requests = [Request(str(i), 8192, [0] * 8193, 100, 0.0, computed=8192) for i in range(64)]
    drafter.precompute_kv([ScheduledRequest(r, 8192, 1) for r in requests], lambda _: None)
    size = 64, 0, 4, 2
    assert drafter.seconds(*size) == EAGLE3_8B_H200.seconds(*size)
    for _ in range(100):
        drafter.spent = 0.0
        drafter.propose([ScheduledRequest(r, 8192, 1, 32, 4) for r in requests], lambda _: None, 4, 2)
    assert drafter.spent == pytest.approx(EAGLE3_8B_H200.seconds(*size, 64 * 8192))
    assert drafter.spent > 2 * EAGLE3_8B_H200.seconds(*size)
    assert drafter.seconds(*size) == pytest.approx(drafter.spent, rel=0.05)


# -- acceptance --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_trees_get_the_published_acceptance_lengths(name: str) -> None:
    found = np.mean([acceptance_length(FITTED[name], seed, requests=32) for seed in (1, 2)])
    assert found == pytest.approx(PUBLISHED[name], rel=0.04)


@pytest.mark.slow
def test_the_fit_finds_the_chance_again() -> None:
    assert fitted(PUBLISHED["CNN/DM"]) == pytest.approx(FITTED["CNN/DM"], abs=0.01)


# -- gains -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("batch", "context", "least"), [(1, 512, 2.5), (16, 2048, 1.5), (64, 512, 1.0), (64, 8192, 1.0), (256, 512, 0.99)]
)
def test_drafts_never_make_it_slower(batch: int, context: int, least: float) -> None:
    plain, drafted = (serve(None, Case(batch, context, drafts)) for drafts in (False, True))
    assert drafted["speed"] >= least * plain["speed"]
    assert plain["tokens"] == pytest.approx(1.0) and plain["drafts"] == plain["drafting"] == 0.0
    assert drafted["tokens"] <= 1 + min(drafted["drafts"], 8)


@pytest.mark.usefixtures("short")
def test_beyond_the_ridge_trees_shrink_and_grow_again_with_the_context() -> None:
    nodes = [serve(None, Case(batch, 512, True))["drafts"] for batch in (4, 16, 64)]
    assert nodes[0] > 20 > nodes[1] > 2 * nodes[2]
    aware, blind = (serve(None, Case(64, 8192, True, blind=blind)) for blind in (False, True))
    assert aware["drafts"] > 2 * blind["drafts"] and aware["speed"] > 1.1 * blind["speed"]


@pytest.mark.usefixtures("short")
def test_a_drafter_that_is_hardly_ever_right_is_left_alone() -> None:
    plain, drafted = (serve(None, Case(64, 512, drafts, chance=0.02)) for drafts in (False, True))
    assert drafted["speed"] > 0.95 * plain["speed"] and drafted["drafting"] < 0.05


@pytest.mark.usefixtures("short")
def test_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "acceptance_length", partial(acceptance_length, requests=4, tokens=64))
    found = simulated(Runs(tmp_path / "runs.jsonl"), 2, (4,), (512,), ())
    (row,) = found["rows"]
    mean, low, high = row["relative"]
    assert 2.5 < low <= mean <= high and row["speed"][0] == pytest.approx(mean * row["plain"], rel=0.01)
    speed, fit = (sections({"simulated": found})[name].splitlines() for name in ("speed", "fit"))
    assert len(speed) == 3 and speed[-1].startswith(f"| 512 | 4 | {row['plain']:,.0f} | ")
    assert [line.split(" | ")[1] for line in fit[2:]] == [f"{length:.2f}" for length in PUBLISHED.values()]
    assert Case(256, 8192, True).running < 100 <= Case(256, 512, True).running
