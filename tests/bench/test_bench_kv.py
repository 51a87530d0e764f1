"""The benchmark of INT8 KV and of swapping, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import tiny
from jaxspec.bench.__main__ import main


@pytest.mark.slow
def test_it_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("jaxspec.models.load.load_model", lambda source: tiny.model())
    text, out = tmp_path / "text", tmp_path / "kv.json"
    text.write_text("".join(chr(32 + 7 * i % 90) for i in range(90)))
    sizes = ["--tokens", "86", "--context", "40", "--chunk", "16", "--requests", "2", "--committed", "40"]
    few = ["--pages", "1", "3", "--repeats", "2", "--json", str(out)]
    assert main(["kv", "--text", str(text), *sizes, *few]) == 0
    found = json.loads(out.read_text())
    quality = found["quality"]
    assert quality["auto"]["positions"] == quality["int8"]["positions"] == 86 - 3
    assert quality["int8"]["perplexity"] == pytest.approx(quality["auto"]["perplexity"], rel=0.2)
    changes = quality["logprob_change_mean"], quality["logprob_change_max"]
    assert 0 < changes[0] <= changes[1] and 0 <= quality["likeliest_changed"] < 0.5
    assert set(found["pool_step_ms"]) == {"auto", "int8"} and len(found["steps"]) == 2
    for steps in found["steps"]:
        assert set(steps["step_ms"]) == {"0", "1", "3"} and min(steps["step_ms"].values()) > 0


def test_what_cannot_be_measured_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "--model", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
