"""SPIN's experiments in the simulator: costs, the model of the requests, what is compared, and the page."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxspec.bench.papers.spin import experiment as spin
from jaxspec.bench.papers.spin import simulation as spin_simulation
from jaxspec.bench.papers.spin import simulation_report as spin_simulation_page
from jaxspec.bench.papers.spin.difficulty import BEST_WITH_265M, EASE, SSMS, Dataset, accepted, rates
from jaxspec.bench.papers.spin.oracle import Oracle, Together
from jaxspec.bench.papers.spin.systems import (
    AS_MEASURED,
    CALIBRATIONS,
    CHOICES,
    GREEDY,
    LBSS,
    ORACLE,
    ROOFLINE,
    SPIN,
    SYSTEMS,
    UNPACKED,
    UNPIPED,
    VANILLA,
    VERIFIED_PACKED,
    VERIFIED_PADDED,
    Flow,
    Requests,
    System,
    choosing,
    goodput,
    simulation,
)
from jaxspec.sched.request import Request
from jaxspec.sched.sim.cost import LLAMA_V100, StepLoad
from jaxspec.sched.sim.draft_cost import DraftCost
from jaxspec.sched.sim.workload import Lengths, Workload

LLM = "llama-7b"


def table(inputs: float, outputs: float, rows: int = 300, seed: int = 0) -> Lengths:
    rng = np.random.default_rng(seed)
    return Lengths(rng.geometric(1 / inputs, rows), rng.geometric(1 / outputs, rows), np.full(rows, np.nan))


def requests_of(rates: np.ndarray, output: int = 60) -> Requests:
    n = len(rates)
    work = Workload(np.zeros(n), np.full(n, 20), np.full(n, output), np.full(n, np.nan))
    return Requests(work, rates)


def request(number: int) -> Request:
    return Request(str(number), 1, [0], 1, 0.0)


# --- costs ------------------------------------------------------------------------------------------------------------


def test_a_v100_reads_weights_in_what_its_data_sheet_allows():
    assert LLAMA_V100[LLM].cost.weights == pytest.approx(2 * 6.74e9 / (0.8 * 900e9))
    # 13B on two and 30B on four devices: 1.9 and 4.8 times the parameters.
    assert LLAMA_V100["llama-13b"].cost.weights < LLAMA_V100[LLM].cost.weights < LLAMA_V100["llama-30b"].cost.weights
    assert LLAMA_V100[LLM].kv_bytes == 512 * 1024
    assert all(machine.positions > 20_000 for machine in LLAMA_V100.values())


def test_the_fitted_times_are_those_published():
    cost = AS_MEASURED.targets[LLM]
    assert cost.seconds(StepLoad(80, 0, 3626)) == pytest.approx(VERIFIED_PADDED)
    assert cost.seconds(StepLoad(80, 0, 1322)) == pytest.approx(VERIFIED_PACKED)
    assert cost.seconds(StepLoad(1)) > ROOFLINE.targets[LLM].seconds(StepLoad(1))


@pytest.mark.parametrize("costs", CALIBRATIONS.values(), ids=CALIBRATIONS)
def test_larger_draft_models_are_slower(costs):
    rounds = [costs.drafts[name].seconds(8, 16, 4, 1) for name in SSMS]
    assert rounds == sorted(rounds) and rounds[0] < 0.1 * rounds[-1]


def test_reading_kv_makes_a_draft_longer_by_its_requests():
    with_kv, without = DraftCost(1.0, 0.01, 0.5), DraftCost(1.0, 0.01)
    assert without.seconds(8, 16, 4, 1) == pytest.approx(4.0)
    assert with_kv.seconds(8, 16, 4, 1) == pytest.approx(4.0 + 4 * 8 * 0.5) and with_kv.seconds(8, 16, 0, 1) == 0


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BEST_WITH_265M)
def test_the_share_best_served_with_265m_is_the_papers(name):
    found = spin_simulation.facts(Dataset([table(20, 60)], [EASE[name]]))
    assert found["best"][SSMS.index("265M")] == pytest.approx(BEST_WITH_265M[name], abs=0.03)
    assert sum(found["best"]) == pytest.approx(1.0)


def test_a_chain_is_accepted_up_to_the_first_that_is_not():
    rng = np.random.default_rng(0)
    drawn = np.minimum.accumulate(rng.random((100_000, 4)) < 0.7, axis=1).sum(1).mean()
    assert accepted(np.array([0.7]))[0] == pytest.approx(drawn, abs=0.02)
    assert accepted(np.array([[1.0, 0.0]]), 3).tolist() == [[3.0, 0.0]]


def test_draft_models_differ_in_what_ease_does_not_explain():
    apart = []
    for residual in (0.0, 1.0):
        drawn = rates(EASE["alpaca"], 2000, np.random.default_rng(0), residual)
        logit = np.log(drawn / (1 - drawn))
        apart.append(float((logit[:, 0] - logit[:, 1]).std()))
    assert apart[1] > apart[0] + 0.5


def test_datasets_keep_to_their_lengths_and_seeds():
    short, long = table(20, 40), table(200, 400, seed=1)
    mix = Dataset([short, long], [EASE["cp"], EASE["alpaca"]])
    one, same, other = mix.requests(400, 3), mix.requests(400, 3), mix.requests(400, 4)
    assert (one.rates == same.rates).all() and (one.work.input == same.work.input).all()
    assert (one.rates != other.rates).any()
    pairs = set(zip(one.work.input.tolist(), one.work.output.tolist(), strict=True))
    assert pairs <= {p for t in (short, long) for p in zip(t.input.tolist(), t.output.tolist(), strict=True)}
    written = mix.writing(50).requests(400, 0).work.output
    assert written.min() >= 25 and written.max() < 75 and written.mean() == pytest.approx(50, abs=3)


# --- choices that know ------------------------------------------------------------------------------------------------


def test_the_oracle_matches_within_limits():
    oracle = Oracle(np.array([[0.9, 0.1], [0.8, 0.1], [0.1, 0.9]]), [0.01, 0.01], lambda: 0.1, [1, 3])
    cost = lambda request, drafter: 0.0  # noqa: E731
    assert oracle.assign([request(0), request(2)], cost) == [0, 1]
    assert oracle.assign([request(0), request(1), request(2)], cost) == [0, 1, 1]


def test_counting_the_waiting_gives_up_a_slow_drafter_for_one_request():
    known = np.array([[0.6, 0.65]] * 7 + [[0.1, 0.95]])
    cost = lambda request, drafter: 0.0  # noqa: E731
    everyone = [request(i) for i in range(8)]
    assert Oracle(known, [0.01, 0.05], lambda: 0.1, [8, 8]).assign(everyone, cost) == [0] * 7 + [1]
    assert Together(known, [0.01, 0.05], lambda: 0.1).assign(everyone, cost) == [0] * 8
    # Where it pays to wait, every request has the drafter that guesses best in that time; rounds in any order.
    assert Together(known[:, ::-1], [0.011, 0.01], lambda: 0.1).assign(everyone, cost) == [0] * 8
    assert Together(known, [0.01, 0.05], lambda: 0.1).assign([], cost) == []


# --- the pipeline -----------------------------------------------------------------------------------------------------


def test_micro_batches_that_flow_take_as_long_as_the_busier_side():
    flow, ends = Flow(), []
    for _ in range(50):
        flow.begin()
        for _ in range(2):
            flow.add([1.0], [], 1.0)
        ends.append(flow.verified)
    # Two micro-batches keep both sides busy: two seconds a step. In one they take turns.
    assert ends[0] == 3.0 and ends[5:] == [2.0] * 45
    alone = Flow()
    for _ in range(3):
        alone.begin()
        alone.add([1.0], [], 1.0)
        assert alone.verified == 2.0
    slow = Flow()
    for _ in range(10):
        slow.begin()
        for _ in range(2):
            slow.add([3.0], [], 1.0)
    assert slow.verified == 6.0


# --- what is compared -------------------------------------------------------------------------------------------------


def test_goodput_counts_while_requests_wait_for_free_slots():
    given = requests_of(np.full((24, 5), 0.6))
    served = simulation(VANILLA["68M"], AS_MEASURED, LLM, given, 0).run()
    found = goodput(served)
    assert 0 < found["accepted"] < found["tokens"]
    # A request's share of the target's own tokens is that of its steps.
    assert found["accepted"] / found["tokens"] == pytest.approx(
        served.accepted.sum() / served.workload.output.sum(), abs=0.03
    )
    whole = served.workload.output.sum() / served.duration
    assert found["tokens"] >= whole


@pytest.mark.slow
def test_draft_choice_pays_where_requests_differ():
    """Two kinds of requests, each with a small draft model that knows it and others that don't."""
    known = np.full((64, 5), 0.3)
    known[::2, 0] = known[1::2, 1] = 0.95
    given = requests_of(known, 120)
    run = lambda system: goodput(simulation(system, AS_MEASURED, LLM, given, 0).run())["tokens"]  # noqa: E731
    learned = run(System(LBSS.but(lbss={"exploration": 1, "chunk": 1})))
    best = max(run(VANILLA[name]) for name in SSMS)
    assert run(CHOICES[ORACLE]) > learned > run(CHOICES[GREEDY])
    assert run(CHOICES[ORACLE]) > 1.2 * best


def test_packing_and_flowing_make_steps_shorter():
    given = Dataset([table(20, 60)], [EASE["alpaca"]]).requests(48, 0)
    run = lambda system: goodput(simulation(system, AS_MEASURED, LLM, given, 0).run())["tokens"]  # noqa: E731
    single = replace(SYSTEMS[UNPIPED], preset=choosing("single"), ssms=("1.1B",))
    padded, packed = run(replace(single, padded=True)), run(single)
    flowing = run(replace(single, micro_batches=2, flowing=True))
    assert padded < packed < flowing
    assert SYSTEMS[UNPACKED].padded and not SYSTEMS[SPIN].padded


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin_simulation, "LLMS", {"as measured": (LLM,), "roofline": (LLM,)})
    monkeypatch.setattr(spin_simulation, "CHOSEN_FOR", (LLM,))
    monkeypatch.setattr(spin_simulation, "BATCHES", (1, 16))
    monkeypatch.setattr(spin_simulation_page, "BATCHES", (1, 16))
    for module in (spin_simulation, spin_simulation_page):
        monkeypatch.setattr(module, "PARTS", (1, 2, None))
        monkeypatch.setattr(module, "LBSS_SETTINGS", ({"exploration": 2, "chunk": 1},))
    monkeypatch.setattr(spin_simulation, "CROWDS", (8,))
    monkeypatch.setattr(spin_simulation, "RESIDUALS", (0.3,))
    monkeypatch.setattr(spin_simulation, "ANSWERS", (20,))


def options_for(tmp_path: Path) -> list[str]:
    rows = [{"turns": ["Tell me of owls"], "reference": "Owls " * (4 + i)} for i in range(12)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"turns": row["turns"]}) for row in rows))
    files = {"alpaca": "answers", "chat-answers": "answers", "chatbot": "answers", "chat": "prompts"}
    return [part for name, file in files.items() for part in (f"--{name}", str(tmp_path / f"{file}.jsonl"))]


def parsed(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    spin.add_data(parser)
    parser.set_defaults(seed=0, repeats=None)
    return parser.parse_args(given)


@pytest.mark.slow
def test_all_experiments_make_a_page(quick, tmp_path):
    runs: list[int] = []
    found = spin_simulation.simulate(parsed([*options_for(tmp_path), "--jobs", "10"]), lambda: runs.append(1))
    assert len(runs) == spin_simulation.points()
    kept = json.loads(json.dumps(found))
    text = "\n".join(spin_simulation_page.sections(kept).values())
    for expected in ("(Fig. 10) | 2.34×", "| 40 % |", "LBSS", "heuristic", "32.21"):
        assert expected in text
    spin_simulation_page.draw(tmp_path, kept)
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "spin_goodput.png",
        "spin_selection.png",
        "spin_simulated_pipeline.png",
    }


def test_data_that_cannot_be_read_is_named(tmp_path):
    given = options_for(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"turns": []}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl"):
        spin_simulation.read_datasets(parsed(given))
