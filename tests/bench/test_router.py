"""`jaxspec.bench router`: every request is measured; what needs Ray says how to install it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.paths import GOLDEN
from jaxspec.bench.__main__ import main
from jaxspec.sched.routing import routing_names

SMALL = ["router", "--model", str(GOLDEN / "llama"), "--requests", "20", "--prompt-tokens", "70"]


@pytest.mark.parametrize("policy", routing_names())
def test_every_policy_is_measured(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--routing", policy, "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["options"]["routing"] == policy
    (row,) = found["milliseconds"].values()
    assert 0 < row["p50"] <= row["p95"] <= row["p99"] <= row["max"]
    assert "routing and dispatch" in capsys.readouterr().out


def test_without_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*SMALL, "--ray"]) == 2
    assert ".[ray]" in capsys.readouterr().err
