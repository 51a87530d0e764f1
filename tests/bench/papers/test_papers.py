"""`jaxspec.bench paper`: the experiments run, their tables hold what they should, and the page keeps its text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers import tiny
from helpers.small import SMALL
from jaxspec.bench import BenchError, papers
from jaxspec.bench.__main__ import main
from jaxspec.bench.estimates import Estimate
from jaxspec.bench.papers import page, presets
from jaxspec.bench.papers.serving import simulate
from jaxspec.bench.papers.ssjf import cases
from jaxspec.bench.papers.ssjf import experiment as ssjf
from jaxspec.bench.papers.ssjf.cases import Case, Data
from jaxspec.bench.papers.ssjf.report import CLASSES, FCFS, KNOWN, MODES, NOISY
from jaxspec.bench.papers.variants import Variants
from jaxspec.bench.table import markdown as table_of
from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.cost import SSJF
from jaxspec.sched.sim.workload import Lengths, join


def table(seed: int = 0, rows: int = 400) -> Lengths:
    """Answers of 1 to 500 tokens, the classes right for three of four."""
    rng = np.random.default_rng(seed)
    output = rng.geometric(1 / 150, rows).clip(1, 500)
    guess = np.where(rng.random(rows) < 0.75, output, rng.permutation(output)).astype(float)
    return Lengths(np.full(rows, 8), output, guess)


# --- SSJF -------------------------------------------------------------------------------------------------------------


def figure(mode: str, orders: Sequence[str] = (FCFS, CLASSES, KNOWN)) -> dict[str, dict[str, Estimate | None]]:
    """Gains over FCFS of 40 jobs at 4 and at 8 jobs/s, three seeds."""
    blank = Lengths(table().input, table().output, np.full(len(table()), np.nan))
    data = Data(ssjf.ORDERS, {CLASSES: table(), FCFS: blank, KNOWN: blank}, "", Variants())
    part = [
        Case(order, order, cases.RATE, rate, mode, seed, jobs=40)
        for order in orders for rate in (4.0, 8.0) for seed in range(3)
    ]  # fmt: skip
    return ssjf.summary(part, {case: cases.serve(data, case) for case in part})


@pytest.mark.parametrize("mode", MODES)
def test_shorter_first_serves_sooner_and_knowing_more_so(mode):
    gains = figure(mode)
    predicted, known, throughput = gains[CLASSES]["jct"], gains[KNOWN]["jct"], gains[CLASSES]["quarter"]
    assert predicted is not None and known is not None and throughput is not None
    assert 10 < predicted.mean < known.mean < 70
    assert predicted.low < predicted.mean < predicted.high
    assert throughput.mean > 1


def test_answers_of_a_batch_leave_together():
    rng = np.random.default_rng(0)
    work = join(arrivals.burst(8), table(), 8, rng)
    policy = PolicyConfig(batching="dynamic", max_batch_size=4)
    served = simulate(policy, 4, work, SSJF)
    together = cases.returned_together(served)
    ends = [served.finished[:4].max(), served.finished[4:].max()]
    assert together.finished.tolist() == [ends[0]] * 4 + [ends[1]] * 4


def test_gaps_ascend_as_published():
    times = [a.time for a in cases.sorted_gaps(50, 3.0, np.random.default_rng(0))]
    gaps = np.diff(times)
    assert len(times) == 50 and (np.diff(gaps) >= 0).all()
    assert times[-1] > 10 * times[len(times) // 2]


def test_a_knee_is_the_rate_that_the_limit_allows():
    blank = Lengths(table().input, table().output, np.full(len(table()), np.nan))
    data = Data(ssjf.ORDERS, {FCFS: blank}, "", Variants())
    case = Case(FCFS, FCFS, cases.RATE, 0.2, "none", 0, jobs=60)
    rate = cases.find_knee(data, cases.Knee(case, 30.0))["rate"]
    at, beyond = (cases.serve(data, replace(case, x=x))["jct"] for x in (rate, 1.1 * rate))
    assert at <= 30 < beyond


def test_rounds_of_conversations(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text('{"replies": ["one two three", "one"]}\n{"replies": ["one two three four five six"]}\n')
    assert [rows.tolist() for rows in cases.read_rounds(path, 2)] == [[4, 8], [1]]
    with pytest.raises(ValueError, match="3 rounds"):
        cases.read_rounds(path, 3)
    path.write_text('{"turns": ["no replies"]}\n')
    with pytest.raises(ValueError, match="line 1"):
        cases.read_rounds(path, 1)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small experiments on the tiny model."""
    for name, value in (("MANY", 12), ("LIMIT", 6.0), ("RATES", (5,)), ("CVS", (2,)), ("SIZES", (2, 4))):
        monkeypatch.setattr(ssjf, name, value)
    monkeypatch.setattr(ssjf, "V100_QUERY_MS", {"gpt2-xl": 1602})
    monkeypatch.setattr("jaxspec.llm.LLM", lambda **s: tiny.llm(**s | {"show_progress": False}))


def data(tmp_path: Path) -> list[str]:
    lengths = table(rows=60)
    talks = [{"turns": ["Hi"] * 5, "replies": ["word " * (3 + i + k) for k in range(5)]} for i in range(6)]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    (tmp_path / "functions.csv").write_text("arrival_s\n" + "\n".join(map(str, range(20))) + "\n")
    rows = [f"{1 + o // 10},{int(np.digitize(g, [141, 503]))},{int(np.digitize(g, ssjf.BOUNDS))}"
            for o, g in zip(lengths.output, lengths.predicted, strict=True)]  # fmt: skip
    (tmp_path / "lengths.csv").write_text("output_tokens,pred_class3,pred_class5\n" + "\n".join(rows) + "\n")
    files = [
        part
        for name, file in (("lengths", "lengths.csv"), ("conversations", "talks.jsonl"), ("functions", "functions.csv"))
        for part in (f"--{name}", str(tmp_path / file))
    ]
    return ["ssjf", *files, "--processes", "1", "--keep", str(tmp_path / "keep")]


@pytest.mark.slow
def test_ssjf_simulated_and_then_on_the_engine(quick, tmp_path):
    out, command = tmp_path / "docs", data(tmp_path)
    common = [*command, "--out", str(out)]
    own = ["--system", "own=sjf_oracle,aging_ms=900", "--predictor", "noisy:0.1"]
    assert main(["paper", *common, "--seeds", "2", *own]) == 0
    text = (out / "ssjf.md").read_text()
    for expected in ("Fig. 4", "Fig. 8", "Fig. 9", "Table 2", "34.5 %", "gpt2-xl", "own", "noisy:0.1"):
        assert expected in text
    assert "[SSJF](ssjf.md)" in (out / "README.md").read_text()
    assert {f.name for f in out.glob("*.png")} == {
        "ssjf_jct_rate.png", "ssjf_jct_cv.png", "ssjf_throughput_rate.png", "ssjf_throughput_cv.png",
        "ssjf_batch_sizes.png",
    }  # fmt: skip
    # Explanations outside of the marks stay, the engine's column fills, what was simulated stays.
    (out / "ssjf.md").write_text(text.replace("# SSJF\n", "# SSJF\n\nWhy it differs.\n"))
    settings = [part for setting in SMALL for part in ("--set", setting)]
    settings[settings.index("max_num_seqs=4")] = "max_num_batched_tokens=16"
    work = ["--engine", "--engine-jobs", "5", "--engine-scale", "0.05", "--engine-rate", "500", "--repeats", "2"]
    assert main(["paper", *common, *work, *settings]) == 0
    kept = json.loads((out / "ssjf.json").read_text())
    assert set(kept) == {"simulated", "engine"}
    assert [len(kept["engine"]["reduction"][mode][NOISY]) for mode in MODES] == [3, 3, 3]
    after = (out / "ssjf.md").read_text()
    assert "Why it differs." in after and after.count("<!-- JCT -->") == 1
    assert "…" in next(line for line in after.splitlines() if line.startswith("| rates (Fig. 4), dynamic"))


@pytest.mark.slow
def test_quick_runs_leave_the_published_pages(quick, tmp_path, capsys, monkeypatch):
    published, own = tmp_path / "published", tmp_path / "quick"
    monkeypatch.setattr(papers, "OUT", published)
    monkeypatch.setattr(papers, "QUICK_OUT", own)
    page.write(published / "ssjf.md", "SSJF\n\nWhat we learned.", {"JCT": "the published table"})
    assert main(["paper", *data(tmp_path), "--quick", "--seeds", "1"]) == 0
    assert [f.name for f in published.iterdir()] == ["ssjf.md"]
    assert "the published table" in (published / "ssjf.md").read_text()
    text = (own / "ssjf.md").read_text()
    assert "What we learned." in text and "the published table" not in text and "too few seeds" in text
    printed = capsys.readouterr()
    assert "too few seeds" in printed.out and "paper 34.5 %, simulated" in printed.out
    assert str(own / "ssjf.md") in printed.out


def test_options_are_not_abbreviated(capsys):
    with pytest.raises(SystemExit):
        main(["paper", "ssjf", "--proc", "1"])
    with pytest.raises(SystemExit):
        main(["serve", "--burst"])
    assert capsys.readouterr().err.count("unrecognized arguments") == 2


def test_unreadable_data_is_named(tmp_path, capsys):
    common = ["paper", "ssjf", "--out", str(tmp_path), "--engine"]
    assert main([*common, "--lengths", str(tmp_path / "none.csv"), "--data", str(tmp_path)]) == 2
    assert "none.csv" in capsys.readouterr().err
    assert main(common) == 2
    assert "--data DIR, or --lengths CSV" in capsys.readouterr().err
    (tmp_path / "ssjf.json").write_text("not json")
    with pytest.raises(BenchError, match=r"ssjf\.json"):
        page.keep(tmp_path / "ssjf.json", "engine", {}, None)


def test_systems_are_presets_with_changes(tmp_path, monkeypatch):
    preset = presets.Preset("sjf_oracle").but(max_batch_size=2)
    config = preset.but(order="fcfs").load(max_batch_size=3, max_num_seqs=5)
    assert (config.predictor, config.order, config.max_batch_size, config.max_num_seqs) == ("oracle", "fcfs", 2, 5)
    assert preset.load().order == "sjf"
    monkeypatch.setattr(presets, "CONFIGS", tmp_path)
    with pytest.raises(BenchError, match=r"sjf_oracle\.yaml is missing: the experiments run from a checkout"):
        preset.load()


def test_tables_replace_only_what_stands_between_their_marks(tmp_path):
    path = tmp_path / "p.md"
    page.write(path, "Title", {"a": "old", "b": "kept"})
    path.write_text(path.read_text() + "\nown words\n")
    page.write(path, "Title", {"a": table_of([["1", 2]], "x", "y")})
    text = path.read_text()
    assert "old" not in text and "| 1 | 2 |" in text and "kept" in text
    assert text.startswith("# Title\n") and text.endswith("own words\n")
