"""`jaxspec.bench simulate` and `jaxspec.bench record`, as their users call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from jaxspec.bench.__main__ import main
from jaxspec.sched.acceptance import load_process
from jaxspec.sched.cost import load_profile
from jaxspec.sched.recording import Recording

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
    (tmp_path / "sjf.yaml").write_text("order: sjf\nmax_num_seqs: 2\n")
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
    # Without predictions an order by length has only what requests ask for, which here is what they write.
    assert mean["b"] == mean["o"]


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
        (["--burst"], "output_tokens"),
        (["--burst", "--lengths", "LENGTHS", "--predictions", "pred"], "no column pred"),
        (["--burst", "--lengths", "LENGTHS", "--set", "predictor=proxy"], "predictor: proxy reads prompts, and simul"),
        (["--burst", "--lengths", "LENGTHS", "--cost", "gpu"], "no cost model 'gpu'"),
        (["--burst", "--lengths", "LENGTHS", "--acceptance", "2"], "acceptance '2'"),
        (["--burst", "--lengths", "LENGTHS", "--draft-length", "-1"], "--draft-length"),
        (["--burst", "--lengths", "LENGTHS", "--set", "order=best"], "order"),
        (["--burst", "--lengths", "LENGTHS", "--set", "max_model_len=30"], "max_model_len"),
        (["--burst", "--lengths", "LENGTHS", "--set", "kv_cache_tokens=32"], "KV pool"),
        (["--trace", "none.csv"], "none.csv"),
        (["--request-rate", "1", "--burstiness", "-1", "--lengths", "LENGTHS"], "burstiness"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(options, message, lengths, capsys):
    given = [lengths if option == "LENGTHS" else option for option in options]
    assert main(["simulate", *given]) == 2
    err = capsys.readouterr().err.strip()  # the progress bar leaves an empty line
    assert message in err and "\n" not in err


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model stands for any."""
    monkeypatch.setattr("jaxspec.llm.LLM", lambda **s: tiny.llm(**s | {"show_progress": False}))


SMALL = (
    "compilation_cache=", "kv_cache_tokens=2048", "max_model_len=128", "max_num_batched_tokens=16", "page_size=16",
    "max_num_seqs=4", "token_buckets=[16]", "prefix_caching=false",
)  # fmt: skip


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
    work += ["--set", "tree=chain", "--set", "draft_levels=3", "--request-rate", "200"]
    given = ["--json", files[0], "--profile", files[1], "--acceptance", files[2]]
    assert main(["record", *options, *work, *given]) == 0
    recording, profile = Recording.read(files[0]), load_profile(files[1])
    assert sorted(recording.completed()) == list(range(12)) and profile.buckets == (16,)
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
