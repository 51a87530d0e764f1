"""The benchmark of INT8 KV and of swapping, on a tiny model."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from helpers import tiny
from jaxspec.bench import kv
from jaxspec.bench.__main__ import main


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    kv.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.slow
def test_it_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    ids = [int(i) % 256 for i in range(3, 600, 7)]
    args = arguments("--context", "40", "--chunk", "16", "--requests", "2", "--committed", "40", "--pages", "1", "3")
    args.repeats = 2
    found = kv.quality(tiny.model(), ids, args)
    assert found["auto"]["positions"] == found["int8"]["positions"] == len(ids) - -(-len(ids) // 40)
    assert found["int8"]["perplexity"] == pytest.approx(found["auto"]["perplexity"], rel=0.2)
    assert 0 < found["logprob_change_mean"] <= found["logprob_change_max"] and 0 <= found["likeliest_changed"] < 0.5
    assert set(kv.kv_dtype_times(tiny.model(), args)) == {"auto", "int8"}
    steps = kv.steps(tiny.model(), "int8", args)
    assert set(steps["step_ms"]) == {"0", "1", "3"} and min(steps["step_ms"].values()) > 0


def test_what_cannot_be_measured_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "--model", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
