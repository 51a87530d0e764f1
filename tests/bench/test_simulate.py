"""`jaxspec.bench simulate` and `jaxspec.bench record`, as their users call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import tiny
from helpers.paths import CONFIGS
from helpers.replay import completed
from helpers.small import SMALL
from jaxspec.bench.__main__ import main
from jaxspec.config import EngineConfig
from jaxspec.sched.sim.acceptance import load_process
from jaxspec.sched.sim.cost import PAPER_SCALE, load_profile
from jaxspec.sched.sim.recording import Recording

SIZES = [5 + 10 * (i % 7) for i in range(28)]
LENGTHS = "output_tokens,input_tokens,guess\n" + "".join(f"{n},8,{n}\n" for n in SIZES)


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    return str(tmp_path / "lengths.csv")


def simulate(tmp_path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    assert main(["simulate", *options, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_a_trace_is_served(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens\n0,30,3\n1,10,2\n")
    report = simulate(tmp_path, "--trace", str(tmp_path / "t.csv"), "--slo-ttft-ms", "130", "--slo-tpot-ms", "1")
    # SSJF's constants: 120 ms to the first token, 20 ms to each further one.
    assert report["e2e_ms"]["mean"] == pytest.approx((160 + 140) / 2)
    assert [s["ttft"] for s in report["samples"]] == pytest.approx([0.12, 0.12])
    assert (report["input_tokens"], report["output_tokens"], report["duration_s"]) == (40, 5, pytest.approx(1.14))
    assert report["slo_attainment"] == 0.0
    assert report["extra"]["mean_normalised_latency_s"] == pytest.approx((0.16 / 3 + 0.14 / 2) / 2)
    assert "E2E" in capsys.readouterr().out


def test_policies_come_from_presets_and_predictions_from_columns(tmp_path, lengths):
    (tmp_path / "sjf.yaml").write_text("order: sjf\nmax_num_seqs: 2\ndraft: []\n")
    common = ["--burst", "--num-requests", "60", "--lengths", lengths]
    fcfs = simulate(tmp_path, *common, "--set", "max_num_seqs=2")
    blind = simulate(tmp_path, *common, "--config", str(tmp_path / "sjf.yaml"))
    sjf = simulate(tmp_path, *common, "--config", str(tmp_path / "sjf.yaml"), "--predictions", "guess")
    oracle = simulate(tmp_path, *common, "--config", str(tmp_path / "sjf.yaml"), "--set", "predictor=oracle")
    mean = {name: r["e2e_ms"]["mean"] for name, r in (("f", fcfs), ("b", blind), ("s", sjf), ("o", oracle))}
    assert mean["s"] == mean["o"] < 0.8 * mean["f"]
    # Predictions from the table go before those of the preset's own predictor.
    both = [
        *common,
        "--config",
        str(tmp_path / "sjf.yaml"),
        "--set",
        "predictor=noisy_oracle",
        "--predictions",
        "guess",
    ]
    assert simulate(tmp_path, *both)["e2e_ms"]["mean"] == mean["s"]
    # Without predictions an order by length has only what requests allow, which is the same for all.
    assert mean["b"] == mean["f"]


def test_swapping_takes_pages_of_the_host_and_time_to_move_them(tmp_path, lengths):
    common = ["--burst", "--num-requests", "60", "--lengths", lengths, "--cost", "opt-13b-v100", "--set", "order=alise"]
    common += ["--set", "predictor=noisy_oracle", "--set", "kv_cache_tokens=256", "--set", "page_size=16"]
    plain = simulate(tmp_path, *common)["extra"]
    swapped = simulate(tmp_path, *common, "--host-pages", "500", "--swap-page-ms", "0.1")["extra"]
    assert plain["swaps"] == swapped["recomputed_tokens"] == 0 < plain["recomputed_tokens"] and swapped["swaps"] > 0
    slow = simulate(tmp_path, *common, "--host-pages", "500", "--swap-page-ms", "90", "--set", "memory=swap")["extra"]
    assert swapped["swap_wait_s"] < slow["swap_wait_s"]


def test_drafting_is_reported_and_saves_steps(tmp_path, lengths):
    plain = simulate(tmp_path, "--request-rate", "1", "--num-requests", "50", "--lengths", lengths)
    options = ["--draft-length", "3", "--acceptance", "0.8", "--cost", "v100-opt-1.3b"]
    drafted = simulate(tmp_path, "--request-rate", "1", "--num-requests", "50", "--lengths", lengths, *options)
    assert drafted["extra"]["steps"] < 0.6 * plain["extra"]["steps"]
    assert drafted["acceptance_rate"] == pytest.approx(0.8 * (1 - 0.8**3) / 0.2 / 3, abs=0.05)
    assert plain["acceptance_rate"] is None
    assert drafted["mean_accepted_length"] == pytest.approx(1 + 3 * drafted["acceptance_rate"], abs=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--trace, --request-rate or --burst"),
        (["--trace", "HALF"], "output_tokens"),
        (["--burst", "--predictions", "guess"], "--lengths, which is not given"),
        (["--burst", "--lengths", "LENGTHS", "--predictions", "pred"], "no column pred"),
        (["--burst", "--lengths", "LENGTHS", "--set", "draft_limits={x: 1}", "--set", "draft=ngram"], "no drafter x"),
        (["--burst", "--lengths", "LENGTHS", "--cost", "gpu"], "no cost model 'gpu'"),
        (["--burst", "--lengths", "LENGTHS", "--acceptance", "2"], "acceptance '2'"),
        (["--burst", "--lengths", "LENGTHS", "--draft-length", "-1"], "--draft-length"),
        (["--burst", "--lengths", "LENGTHS", "--set", "order=best"], "order"),
        (["--burst", "--lengths", "LENGTHS", "--set", "max_model_len=30"], "max_model_len"),
        (["--burst", "--lengths", "LENGTHS", "--set", "kv_cache_tokens=32"], "KV pool"),
        (["--trace", "none.csv"], "jaxspec.bench: none.csv: No such file or directory"),
        (["--request-rate", "1", "--burstiness", "-1", "--lengths", "LENGTHS"], "burstiness"),
    ],
)
def test_errors_are_one_line(options, message, lengths, tmp_path, capsys):
    (tmp_path / "half.csv").write_text("arrival_s,output_tokens\n0,3\n1,\n")
    paths = {"LENGTHS": lengths, "HALF": str(tmp_path / "half.csv")}
    given = [paths.get(option, option) for option in options]
    assert main(["simulate", *given]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err and "\n" not in err


PRESETS = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=[p.stem for p in PRESETS])
def test_every_preset_can_be_simulated_out_of_the_box(preset, tmp_path, capsys):
    config = EngineConfig.load(preset)
    some = ["--num-requests", "12", "--request-rate", "8", "--output-tokens", "24:0.5", "--cost", "llama-2-7b-a100"]
    report = simulate(tmp_path, "--config", str(preset), *some)
    said = capsys.readouterr().out.splitlines()
    assert (report["completed"], report["failed"]) == (12, 0) and report["e2e_ms"]["mean"] > 0
    # What stands in for something is said in a line of its own, and kept.
    notes = report["extra"]["notes"]
    assert set(notes) <= set(said)
    about = {note.partition(":")[0] for note in notes}
    assert "lengths" in about
    assert ("predictor" in about) == (config.predictor in ("auto", "proxy", "retrieval"))
    assert ("draft" in about) == bool(config.draft) == (report["acceptance_rate"] is not None)
    assert ("pace" in about) == (config.pace != "none")
    assert not config.draft or report["acceptance_rate"] > 0


def test_stand_ins_are_named(tmp_path, lengths, capsys):
    common = ["--burst", "--num-requests", "20", "--lengths", lengths, "--set", "order=sjf", "--set", "max_num_seqs=4"]
    notes = simulate(tmp_path, *common, "--set", "predictor=proxy")["extra"]["notes"]
    assert len(notes) == 1 and notes[0].startswith("predictor: proxy reads prompts") and "noisy_oracle" in notes[0]
    assert simulate(tmp_path, *common, "--set", "predictor=proxy", "--predictions", "guess")["extra"]["notes"] == []
    assert "only max_tokens" in simulate(tmp_path, *common)["extra"]["notes"][0]
    priority = simulate(tmp_path, *common, "--set", "order=priority", "--set", "memory=swap")["extra"]["notes"]
    assert [note.partition(":")[0] for note in priority] == ["order", "memory"]


def test_notes_say_when_nobody_queued_and_when_kv_was_lost(tmp_path, lengths, capsys):
    common = ["--burst", "--num-requests", "20", "--lengths", lengths]
    free = simulate(tmp_path, *common)
    assert [note.partition(":")[0] for note in free["extra"]["notes"]] == ["queue"]
    assert (free["extra"]["queued_steps"], free["queue_ms"]["p99"]) == (0, 0.0)
    full = ["--set", "kv_cache_tokens=80", "--set", "page_size=16", "--set", "max_num_seqs=4"]
    extra = simulate(tmp_path, *common, *full)["extra"]
    assert extra["preemptions"] and [note.partition(":")[0] for note in extra["notes"]] == ["memory"]
    assert f"{extra['preemptions']} times" in extra["notes"][0] and str(extra["recomputed_tokens"]) in extra["notes"][0]
    said = capsys.readouterr().out
    assert extra["notes"][0] in said.splitlines()
    assert all(row in said for row in ("queue", "E2E (JCT)", "preemptions", "recomputed tokens", "utilisation"))


@pytest.mark.slow
def test_without_lengths_answers_are_log_normal(tmp_path):
    common = ["--num-requests", "1000", "--request-rate", "2"]
    report = simulate(tmp_path, *common)
    written = [s["output_tokens"] for s in report["samples"]]
    assert 110 < np.median(written) < 150 and 160 < np.mean(written) < 220
    assert np.std(np.log(written)) == pytest.approx(0.9, abs=0.1) and 1 <= min(written) <= max(written) <= 1024
    assert {s["input_tokens"] for s in report["samples"]} == {64}
    short = simulate(tmp_path, *common, "--output-tokens", "10:0")
    assert {s["output_tokens"] for s in short["samples"]} == {10}
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens\n0,7\n1,9\n")
    assert simulate(tmp_path, "--trace", str(tmp_path / "t.csv"))["input_tokens"] == 16


def test_slos_of_a_preset_are_used(tmp_path):
    """The scheduler knows step times from the cost model: a pace throttles requests where a full step is too slow."""
    common = ["--burst", "--num-requests", "40", "--output-tokens", "60:0.2", "--cost", "llama-7b-l20"]
    common += ["--set", "slo.tpot_ms=24"]
    free, paced = (simulate(tmp_path, *common, "--set", f"pace={pace}") for pace in ("none", "stta"))
    assert free["slo"]["tpot_ms"] == 24  # the report counts them without being asked
    assert paced["slo_attainment"] > free["slo_attainment"]
    assert not any(note.startswith("pace") for note in paced["extra"]["notes"])


def test_drafts_of_a_preset_pay_where_verifying_costs_little(tmp_path):
    common = ["--burst", "--num-requests", "8", "--output-tokens", "40:0.2", "--cost", "llama-2-7b-a100"]
    common += ["--config", str(PRESETS[0].parent / "adaserve.yaml")]
    drafted, plain = (simulate(tmp_path, *common, *more) for more in ([], ["--draft-length", "0"]))
    assert drafted["duration_s"] < 0.7 * plain["duration_s"]
    assert plain["acceptance_rate"] is None
    good = simulate(tmp_path, *common, "--acceptance", "0.9")
    assert good["mean_accepted_length"] > drafted["mean_accepted_length"] > 1.5


def test_the_help_lists_every_cost(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    said = "".join(capsys.readouterr().out.split())
    assert all(name in said for name in PAPER_SCALE)
    assert "log-normal" in said


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model stands for any."""
    monkeypatch.setattr("jaxspec.llm.LLM", lambda **s: tiny.llm(**s | {"show_progress": False}))


@pytest.mark.slow
def test_the_engine_is_recorded_for_the_simulator(tmp_path, tiny_model, capsys):
    files = [str(tmp_path / name) for name in ("recording.json", "profile.json", "acceptance.json")]
    options = [part for setting in SMALL for part in ("--set", setting)]
    work = [
        "--num-prompts",
        "12",
        "--input-tokens",
        "5:9",
        "--max-tokens",
        "60",
        "--ignore-eos",
        "--draft",
        "truncated:1",
    ]
    work += ["--set", "tree=chain", "--set", "draft_depth=3", "--request-rate", "200"]
    given = ["--json", files[0], "--profile", files[1], "--acceptance", files[2]]
    assert main(["record", *options, *work, *given]) == 0
    recording, profile = Recording.read(files[0]), load_profile(files[1])
    assert sorted(completed(recording)) == list(range(12)) and profile.buckets == (16,)
    assert 0 < load_process(files[2]).mean < 1
    assert "12 requests" in capsys.readouterr().out
    # What it wrote is what the simulator reads.
    report = simulate(
        tmp_path, "--burst", "--num-requests", "5", "--lengths", str(_table(tmp_path)), "--cost", files[1],
        "--acceptance", files[2], "--draft-length", "3",
    )  # fmt: skip
    assert report["e2e_ms"]["mean"] > 0 and report["acceptance_rate"] > 0


def _table(tmp_path: Path) -> Path:
    (tmp_path / "table.csv").write_text("output_tokens\n20\n30\n")
    return tmp_path / "table.csv"


def test_max_tokens_cuts_answers(tmp_path, lengths):
    common = ["--request-rate", "2", "--num-requests", "100", "--lengths", lengths]
    whole, cut = simulate(tmp_path, *common), simulate(tmp_path, *common, "--max-tokens", "30")
    assert max(s["output_tokens"] for s in whole["samples"]) > 30
    assert {s["finish_reason"] for s in whole["samples"]} == {"stop"}
    for sample in cut["samples"]:
        assert sample["output_tokens"] <= 30
        assert sample["finish_reason"] == ("length" if sample["output_tokens"] == 30 else "stop")
