"""The fault harness on replicas, short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def check_replicas_that_fail_lose_no_request(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxspec.bench", "chaos", "--live", "30", "--ray", "--clients", "4"]
    done = subprocess.run([*command, "--json", str(tmp_path / "found.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())["replicas"]
    assert found["failures"] == [] and found["ended"].get("length", 0) > 20 and sum(found["faults"].values()) > 0
