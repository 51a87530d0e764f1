"""SPIN's experiments in the simulator: costs, the model of the requests, what is compared, and the page."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxspec.bench.__main__ import main
from jaxspec.bench.papers.spin import cases, fit
from jaxspec.bench.papers.spin import experiment as spin
from jaxspec.bench.papers.spin import simulation as spin_simulation
from jaxspec.bench.papers.spin.cases import Alone, Case, Data
from jaxspec.bench.papers.spin.difficulty import BEST_WITH_265M, FITTED, SSMS, Dataset, accepted
from jaxspec.bench.papers.spin.flow import Flow, settled
from jaxspec.bench.papers.spin.oracle import Oracle, Together
from jaxspec.bench.papers.spin.systems import (
    ALL,
    CHOICES,
    EPSILON_WRITTEN,
    GREEDY,
    LBSS,
    ORACLE,
    SPIN,
    SYSTEMS,
    UNPACKED,
    UNPIPED,
    VANILLA,
    Requests,
    System,
    choosing,
    goodput,
    simulation,
)
from jaxspec.bench.papers.spin.times import (
    AS_MEASURED,
    CALIBRATIONS,
    MEASURED,
    PACKED_LOAD,
    PADDED_LOAD,
    ROOFLINE,
    SLOW_DRAFTS,
    VERIFIED_PACKED,
    VERIFIED_PADDED,
)
from jaxspec.bench.papers.variants import Variants
from jaxspec.sched.request import Request
from jaxspec.sched.sim.cost import LLAMA_V100, StepLoad
from jaxspec.sched.sim.draft_cost import DraftCost
from jaxspec.sched.sim.workload import Lengths, Workload
from jaxspec.sched.spec.micro_batches import DrafterLoad, seconds

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
    for (tokens, positions), published in ((PADDED_LOAD, VERIFIED_PADDED), (PACKED_LOAD, VERIFIED_PACKED)):
        assert cost.seconds(StepLoad(round(tokens), 0, round(positions))) == pytest.approx(published)
    assert cost.seconds(StepLoad(1)) > ROOFLINE.targets[LLM].seconds(StepLoad(1))


@pytest.mark.parametrize("costs", CALIBRATIONS.values(), ids=CALIBRATIONS)
def test_larger_draft_models_are_slower(costs):
    rounds = [costs.drafts[name].seconds(8, 16, 4, 1) for name in SSMS]
    assert rounds == sorted(rounds) and rounds[0] < 0.1 * rounds[-1]


def test_drafting_can_take_longer():
    rounds = [CALIBRATIONS[times].drafts["616M"].seconds(3, 30, 4, 1) for times in (MEASURED, SLOW_DRAFTS)]
    assert rounds[1] == pytest.approx(2 * rounds[0])


def test_reading_kv_makes_a_draft_longer_by_its_requests():
    with_kv, without = DraftCost(1.0, 0.01, 0.5), DraftCost(1.0, 0.01)
    assert without.seconds(8, 16, 4, 1) == pytest.approx(4.0)
    assert with_kv.seconds(8, 16, 4, 1) == pytest.approx(4.0 + 4 * 8 * 0.5) and with_kv.seconds(8, 16, 0, 1) == 0


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BEST_WITH_265M)
def test_the_share_best_served_with_265m_is_near_the_papers(name):
    found = spin_simulation.models(Dataset([table(20, 60)], [FITTED.ease[name]]))
    assert found["best"][SSMS.index("265M")] == pytest.approx(BEST_WITH_265M[name], abs=0.1)
    assert sum(found["best"]) == pytest.approx(1.0)
    assert found["rates"][0] == min(found["rates"])


def test_the_fit_can_be_repeated():
    """With few requests it comes near to the fitted model, and far from where it starts."""
    found = fit.fit(batches=100)
    assert fit.loss(found) < 1.3 * fit.loss(FITTED) < 0.5 * fit.loss(fit.START)
    assert fit.fit(batches=100) == found


def test_the_fitted_model_has_the_published_figures_within_a_quarter():
    for name, published in fit.PUBLISHED.items():
        found, single, rates = fit.Scene(name, 300).published(FITTED)
        assert set(found) == set(published) and len(single) == len(rates) == len(SSMS)
        for what, value in published.items():
            expected = pytest.approx(value, abs=0.1) if what == fit.SHARE else pytest.approx(value, rel=0.25)
            assert found[what] == expected, (name, what)


@pytest.mark.slow
def test_the_fits_short_cut_agrees_with_the_simulator():
    """Goodput in closed form and of a simulated full batch, for the same acceptance rates."""
    found = fit.Scene("alpaca", 300).published(FITTED)[0]
    data = Data(ALL, {"t": Dataset([table(21, 68)], [FITTED.ease["alpaca"]])}, Variants())
    for name, what in (("68M", "68M"), (GREEDY, "greedy"), (EPSILON_WRITTEN, "ε-greedy"), (UNPACKED, "LBSS (Fig. 10)")):
        runs = [cases.serve(data, Case(name, "t", seed, 96))["accepted"] for seed in range(3)]
        assert np.mean(runs) == pytest.approx(found[what], rel=0.2), name


def test_a_chain_is_accepted_up_to_the_first_that_is_not():
    rng = np.random.default_rng(0)
    drawn = np.minimum.accumulate(rng.random((100_000, 4)) < 0.7, axis=1).sum(1).mean()
    assert accepted(np.array([0.7]))[0] == pytest.approx(drawn, abs=0.02)
    assert accepted(np.array([[1.0, 0.0]]), 3).tolist() == [[3.0, 0.0]]


def test_draft_models_differ_in_what_ease_does_not_explain():
    apart = []
    for residual in (0.0, 1.0):
        drawn = FITTED.rates(FITTED.ease["alpaca"], 2000, np.random.default_rng(0), residual)
        logit = np.log(drawn / (1 - drawn))
        apart.append(float((logit[:, 0] - logit[:, 1]).std()))
    assert apart[1] > apart[0] + 0.5


def test_datasets_keep_to_their_lengths_and_seeds():
    short, long = table(20, 40), table(200, 400, seed=1)
    mix = Dataset([short, long], [FITTED.ease["cp"], FITTED.ease["alpaca"]])
    one, same, other = mix.requests(400, 3), mix.requests(400, 3), mix.requests(400, 4)
    assert (one.rates == same.rates).all() and (one.work.input == same.work.input).all()
    assert (one.rates != other.rates).any()
    pairs = set(zip(one.work.input.tolist(), one.work.output.tolist(), strict=True))
    assert pairs <= {p for t in (short, long) for p in zip(t.input.tolist(), t.output.tolist(), strict=True)}
    # Every seed has as many long answers, and as many requests of each data set.
    most = [np.sort(data.work.output)[-20:].mean() for data in (one, other)]
    assert most[0] == pytest.approx(most[1], rel=0.1)
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


def test_a_fast_drafter_does_not_wait_for_a_slow_one():
    """The second micro-batch has no request of the slow drafter: it is drafted at 2, and verified after the first."""
    flow = Flow()
    flow.begin()
    flow.add([1.0, 5.0], [], 1.0)
    flow.add([1.0, 0.0], [], 1.0)
    assert flow.free == [2.0, 5.0] and flow.ready == [6.0, 7.0]


def test_the_number_of_flowing_micro_batches_takes_the_pipeline_into_account():
    """Two halves of 4 + 4 seconds: 12 where each step waits for its last, 8 in a full pipeline."""
    loads, step = [DrafterLoad(8, lambda n: 1.0 * n, 1.0, True)], lambda tokens, context: 0.5 * tokens
    assert seconds(2, loads, 0, step) == 12.0 and settled(2, loads, 0, step) == 8.0
    assert settled(1, loads, 0, step) == 16.0


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
    given = Dataset([table(20, 60)], [FITTED.ease["alpaca"]]).requests(48, 0)
    run = lambda system: goodput(simulation(system, AS_MEASURED, LLM, given, 0).run())["tokens"]  # noqa: E731
    single = replace(SYSTEMS[UNPIPED], preset=choosing("single"), ssms=("1.1B",))
    padded, packed = run(replace(single, padded=True)), run(single)
    steps, flowing = (run(replace(single, micro_batches=2, flowing=flows)) for flows in (False, True))
    assert padded < packed < steps < flowing
    assert run(replace(single, micro_batches=None, flowing=True)) > 0.98 * flowing
    assert SYSTEMS[UNPACKED].padded and not SYSTEMS[SPIN].padded and SYSTEMS[SPIN].flowing


DATA = Data(ALL, {"t": Dataset([table(20, 40)], [FITTED.ease["alpaca"]])}, Variants())


def test_requests_that_arrive_over_time_wait_less():
    found = [cases.serve(DATA, Case(UNPIPED, "t", 0, 48, rate=rate)) for rate in (0.0, 0.5, 3.0)]
    assert found[1]["ttft"] < found[2]["ttft"] < found[0]["ttft"]
    assert found[1]["requests"] < found[2]["requests"] and found[1]["own"] > 0
    # All systems get the same requests.
    one, other = (cases.requests(DATA, Case(name, "t", 1, 48, rate=1.0)) for name in (SPIN, "68M"))
    assert (one.rates == other.rates).all() and (one.work.arrival == other.work.arrival).all()


def test_padding_costs_time_and_memory():
    padded, packed = (cases.verify(DATA, Case(f"68M, {way}", "t", 0, 48)) for way in ("padded", "packed"))
    assert padded["ms"] > packed["ms"] and padded["gigabytes"] > packed["gigabytes"]
    assert padded["tokens"] == packed["tokens"]


def test_small_models_draft_faster_and_large_ones_better():
    """Fig. 3: speed times acceptance decides."""
    small, large = ([cases.alone(DATA, Alone(ssm, "t", 0, i)) for i in range(3)] for ssm in ("68M", "1.1B"))
    for a, b in zip(small, large, strict=True):
        assert a["speed"] > 3 * b["speed"]
        assert a["accepted"] < 1 and a["latency"] > 0
    assert np.mean([one["accepted"] for one in small]) < np.mean([one["accepted"] for one in large])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("BATCHES", (1, 16)), ("PARTS", (1, 2, None)), ("CROWDS", (8,)), ("ANSWERS", (20,)), ("LOADS", (0.8,)),
        ("OTHERS", {"llama-30b": ("llama-30b", MEASURED)}), ("SET", {"α 2, β 2": ALL["α 2, β 2"]}),
    ):  # fmt: skip
        monkeypatch.setattr(spin_simulation, name, value)
    few = {name: spin_simulation.VARIATIONS[name] for name in (spin_simulation.AS_FITTED, SLOW_DRAFTS)}
    monkeypatch.setattr(spin_simulation, "VARIATIONS", few)


def options_for(tmp_path: Path) -> list[str]:
    rows = [{"turns": ["Tell me of owls"], "reference": "Owls " * (4 + i)} for i in range(12)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"turns": row["turns"]}) for row in rows))
    files = {"alpaca": "answers", "chat-answers": "answers", "chatbot": "answers", "chat": "prompts"}
    return [part for name, file in files.items() for part in (f"--{name}", str(tmp_path / f"{file}.jsonl"))]


@pytest.mark.slow
def test_the_page_is_written(quick, tmp_path):
    out = tmp_path / "docs"
    given = [*options_for(tmp_path), "--data", str(tmp_path), "--jobs", "6", "--seeds", "2", "--processes", "1"]
    own = ["--system", "own=spin,draft_choice=greedy", "--keep", str(tmp_path / "keep"), "--out", str(out)]
    assert main(["paper", "spin", *given, *own]) == 0
    text = (out / "spin.md").read_text()
    for expected in (
        "| 2.28× |",
        "(Fig. 13)",
        "| 40.0 % |",
        "| LBSS |",
        "heuristic",
        "| llama-7b, Alpaca | own |",
        "1.79×",
    ):
        assert expected in text, expected
    names = "goodput", "selection", "simulated_pipeline", "loads"
    assert {p.name for p in out.glob("*.png")} == {f"spin_{name}.png" for name in names}
    assert "[SPIN](spin.md)" in (out / "README.md").read_text()
    kept = json.loads((out / "spin.json").read_text())
    # A gain is the mean of the seeds' gains.
    point = kept["simulated"]["goodput"][LLM]["alpaca"][SPIN]
    assert len(point["by mean"]) == 3 and point["by best"][0] <= point["by mean"][0] <= point["by worst"][0]


def test_headlines_compare_with_what_the_abstract_says():
    found = {h.published: h for h in spin.headlines({})}
    assert set(found) == {2.28, 65.31 / 32.21, 65.31 / 43.78, 529.21 / 335.46, 1.29}
    assert {h.verdict for h in found.values()} == {"not run"}
    turns = [{"tokens_per_s": 10.0}, {"tokens_per_s": 20.0}]
    faster = [{"tokens_per_s": 12.0}, {"tokens_per_s": 24.0}]
    places = {"device of its own": {"1": turns, "2": faster, "heuristic": turns}}
    pipeline = {"places": places, "draft": "owl", "levels": 1}
    (split,) = [h for h in spin.headlines({"pipeline": pipeline}) if h.published == 1.29]
    assert split.engine == pytest.approx((1.2, 1.2, 1.2))


def test_data_that_cannot_be_read_is_named(tmp_path):
    given = options_for(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"turns": []}\n')
    values = {name[2:].replace("-", "_"): value for name, value in zip(given[::2], given[1::2], strict=True)}
    args = argparse.Namespace(**values)
    with pytest.raises(ValueError, match=r"prompts\.jsonl"):
        spin_simulation.read_datasets(args)
