"""The benchmarks' own parts: arrivals, prompts, reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.paths import CONFIGS
from jaxspec.bench import prompts
from jaxspec.bench.__main__ import main
from jaxspec.bench.offline import add_engine_numbers
from jaxspec.bench.report import Distribution, Report, Sample, Slo, print_table, summarise
from jaxspec.bench.serve import add_server_numbers
from jaxspec.engine.metrics import EngineStats
from jaxspec.sched.sim import arrivals
from jaxspec.sched.slots import TREES

# --- arrivals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_gamma_gaps_have_the_requested_mean_and_variation(cv):
    times = [a.time for a in arrivals.gamma(20_001, 8.0, cv, np.random.default_rng(3))]
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_poisson_is_seeded_and_counts_like_poisson():
    times = [a.time for a in arrivals.poisson(10_000, 5.0, np.random.default_rng(1))]
    assert times == [a.time for a in arrivals.poisson(10_000, 5.0, np.random.default_rng(1))]
    assert times != [a.time for a in arrivals.poisson(10_000, 5.0, np.random.default_rng(2))]
    counts = np.bincount(np.array(times, dtype=int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(("rate", "cv"), [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, -0.1)])
def test_gamma_refuses_impossible_numbers(rate, cv):
    with pytest.raises(ValueError, match="must"):
        arrivals.gamma(3, rate, cv, np.random.default_rng(0))


def test_trace_is_shifted_limited_and_stretched(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n7.0,30,5\n5.0,10,3\n6.0,,\n99.0,1,1\n")
    got = arrivals.trace(path, count=3)
    assert [(a.time, a.input_tokens, a.output_tokens) for a in got] == [(0, 10, 3), (1, None, None), (2, 30, 5)]
    assert [a.time for a in arrivals.trace(path, count=3, rate=4.0)] == [0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("text", "says"), [("time\n1\n", "arrival_s"), ("arrival_s\nsoon\n", "line 2"), ("arrival_s\n", "no rows")]
)
def test_trace_names_what_is_wrong(tmp_path, text, says):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        arrivals.trace(path)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_builtin_prompts_are_distinct_and_all_used_before_any_repeats():
    assert len(set(prompts.PROMPTS)) == len(prompts.PROMPTS) == 32
    picked = prompts.choose(prompts.PROMPTS, 40, np.random.default_rng(0))
    assert set(picked[:32]) == set(prompts.PROMPTS) and len(picked) == 40


def test_prompts_of_a_length():
    assert prompts.of_words(["a b", "c d e"], 7, start=1) == "c d e a b c d"
    assert prompts.of_tokens([[1, 2], [3, 4, 5]], 7, start=1) == [3, 4, 5, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", r"not JSON \(Expecting value\)"),
        ("[1]", 'has no "turns", a list of texts'),
        ("{}", 'has no "turns", a list of texts'),
        ('{"turns": []}', 'has no "turns", a list of texts'),
        ('{"turns": [3]}', "not a text"),
        ('{"turns": [""]}', "not a text"),
    ],
)
def test_prompt_file_errors_name_the_line(tmp_path, line, said):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["hello"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"line 2: .*{said}$"):
        prompts.load(path)


@pytest.mark.parametrize("command", ["offline", "record", "serve"])
def test_a_file_that_is_not_there_is_named_once(command, capsys):
    assert main([command, "--prompts", "/no/such.jsonl"]) == 2
    assert capsys.readouterr().err == "jaxspec.bench: /no/such.jsonl: No such file or directory\n"


# --- report -----------------------------------------------------------------------------------------------------------


def test_distribution_in_milliseconds():
    d = Distribution.of([None, *(i / 1000 for i in range(1, 102))])
    assert d is not None
    assert (d.mean, d.p50, d.p95, d.p99) == pytest.approx((51, 51, 96, 100))
    assert Distribution.of([None]) is None


def test_report_counts_failures_against_the_slo():
    good = Sample(0.0, ttft=0.1, tpot=0.02, e2e=0.5, output_tokens=20, input_tokens=4)
    slow = Sample(0.0, ttft=0.1, tpot=0.09, e2e=2.0, output_tokens=20, input_tokens=4)
    late = Sample(0.0, ttft=0.9, tpot=0.01, e2e=1.0, output_tokens=10, input_tokens=4)
    failed = Sample(0.0, error="HTTP 500: no")
    report = summarise("serve", [good, slow, late, failed], 2.0, options={}, slo=Slo(ttft_ms=500, tpot_ms=50))
    assert (report.completed, report.failed, report.errors) == (3, 1, {"HTTP 500: no": 1})
    assert (report.output_tokens, report.output_tokens_per_s) == (50, 25.0)
    assert (report.slo_attainment, report.goodput_tokens_per_s) == (0.25, 10.0)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["tpot_ms"]["mean"] == pytest.approx(40)


def test_one_token_has_no_tpot_to_miss():
    assert Slo(tpot_ms=1).met_by(Sample(0.0, ttft=0.1, e2e=0.1, output_tokens=1))
    assert not Slo()


def from_stats(drafted: int, accepted: int, verified: int) -> Report:
    report = summarise("offline", [], 1.0, options={})
    after = EngineStats(draft_tokens=drafted, accepted_tokens=accepted, verifications=verified)
    add_engine_numbers(report, EngineStats(), after)
    return report


def from_scrape(drafted: int, accepted: int, verified: int) -> Report:
    report = summarise("serve", [], 1.0, options={})
    names = ("drafts", "draft_tokens", "accepted_tokens")
    values = zip(names, (verified, drafted, accepted), strict=True)
    add_server_numbers(report, {"counters": {f"jaxspec:spec_decode_num_{name}_total": v for name, v in values}})
    return report


@pytest.mark.parametrize("report_of", [from_stats, from_scrape])
def test_acceptance_is_reported_where_something_was_drafted(report_of, capsys):
    report = report_of(40, 10, 8)
    assert (report.acceptance_rate, report.mean_accepted_length) == (0.25, 2.25)
    print_table(report)
    shown = capsys.readouterr().out
    assert "25.0%" in shown and "2.25" in shown

    report = report_of(0, 0, 0)
    written = report.to_json()
    assert written["acceptance_rate"] is None and written["mean_accepted_length"] is None
    print_table(report)
    assert "accept" not in capsys.readouterr().out

    report = report_of(8, 0, 2)
    assert (report.acceptance_rate, report.mean_accepted_length) == (0, 1)


# --- the commands ---


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "config=x"], "unknown setting 'config'"),
        (["--set", "show_progress=1"], "unknown setting 'show_progress'"),
        (["--set", "path=x"], "unknown setting 'path'"),
        (["--draft", "ngram", "--draft", "ngram"], "draft: a drafter is named twice"),
    ],
)
def test_offline_says_in_a_line_why_it_cannot_run(capsys, arguments, says):
    assert main(["offline", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and "Traceback" not in said


@pytest.mark.parametrize(
    "arguments",
    [[], ["serve", "--num-prompts", "0"], ["serve", "--request-rate", "-3"], ["serve", "--input-tokens", "9:3"]],
)
def test_wrong_options_are_refused(capsys, arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and "usage:" in capsys.readouterr().err


def test_plot(tmp_path):
    from jaxspec.bench.plot import draw

    samples = [Sample(0.0, ttft=0.01 * i, tpot=0.001 * i, e2e=1.0, output_tokens=9) for i in range(1, 9)]
    path = tmp_path / "latencies.png"
    draw(summarise("serve", samples, 1.0, options={}, slo=Slo(tpot_ms=5)), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_decisions_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset, out = tmp_path / "short.yaml", tmp_path / "out.json"
    preset.write_text("order: las\nlas: {quantum_ms: 30}\n")
    sizes = ["--waiting", "50", "--running", "4", "--iterations", "60", "--drafting", "3", "--json", str(out)]
    assert main(["scheduler", *sizes, str(preset), str(CONFIGS / "ssjf.yaml")]) == 0
    policies = json.loads(out.read_text())["policies"]
    assert list(policies) == ["short", "ssjf"] and policies["short"]["pauses"] > 0 == policies["ssjf"]["pauses"]
    trees = json.loads(out.read_text())["trees"]
    assert list(trees) == list(TREES.names)
    assert all(0 < row["median ms"] <= row["p99 ms"] and row["nodes"] > 3 for row in trees.values())
    assert all(trees[name]["nodes"] <= 24 for name in ("auto", "equal_greedy", "global_greedy", "adaserve"))
    preset.write_text("order: lifo\n")
    assert main(["scheduler", *sizes, str(preset)]) == 2 and "order: " in capsys.readouterr().err
