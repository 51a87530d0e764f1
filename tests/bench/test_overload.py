"""The overload benchmark against the real application with a fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.fakes import FakeEngine
from helpers.serving import serving
from jaxspec.bench.__main__ import main
from jaxspec.bench.overload import goodput, minutes
from jaxspec.bench.report import Sample, Slo

SMALL = ["--seconds", "2", "--phase-seconds", "4", "--concurrency", "4", "--max-tokens", "5", "--streams", "30"]


def test_goodput_counts_requests_within_their_slo() -> None:
    slo = Slo(ttft_ms=100.0, tpot_ms=None)
    samples = [
        Sample(start=1.0, ttft=0.05, e2e=3.9, output_tokens=300),  # while the server fills
        Sample(start=1.0, ttft=0.05, e2e=4.1, output_tokens=30),
        Sample(start=55.0, ttft=0.05, e2e=6.0, output_tokens=60),
        Sample(start=62.0, ttft=0.2, e2e=1.0, output_tokens=600), Sample(start=63.0, error="HTTP 429: full"),
        Sample(start=119.0, ttft=0.05, e2e=1.5, output_tokens=6000),  # after the load
    ]  # fmt: skip
    assert goodput(samples[:2], slo, 10.0) == 6.0
    assert goodput(samples, slo, 120.0) == 60 / 90
    assert minutes(samples, slo, 120.0) == [5.5, 1.0]


@pytest.mark.slow
def test_an_overloaded_server_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(step=0.02, max_num_seqs=2, max_queued_requests=2, max_model_len=4096)
    engine.start()
    with serving(engine) as url:
        assert main(["overload", "--base-url", url, "--record", str(tmp_path), "--label", "two slots", *SMALL]) == 0
    engine.shutdown()
    (run,) = json.loads((tmp_path / "reliability.json").read_text())["overload"]
    assert run["sent"] == run["served"] + run["refused"] and not run["failures"] and not run["without_retry_after"]
    assert run["streams"]["opened"] == 30 == run["streams"]["served"] + run["streams"]["refused"]
    assert run["streams"]["refused"] > 0 < run["goodput"]  # two slots, two places
    assert "capacity requests per s" in capsys.readouterr().out
    page = (tmp_path / "reliability.md").read_text()
    assert "| server | two slots |" in page and f"| sent; served | {run['sent']:,}; {run['served']:,} |" in page


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overload", "--base-url", "http://127.0.0.1:9", *SMALL]) == 2
    assert "cannot reach" in capsys.readouterr().err
    assert main(["overload", "--api-key", "one", *SMALL]) == 2
