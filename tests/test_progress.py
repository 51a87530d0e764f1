"""Progress where standard error is no terminal."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import progress


def test_lines_instead_of_a_bar_without_a_terminal(capsys, monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    with progress.progress("simulations", 100, done=10) as advance:
        for _ in range(90):
            seconds[0] += 1.0
            advance()
    assert capsys.readouterr().err.splitlines() == [
        "simulations: 13 of 100", "simulations: 43 of 100", "simulations: 73 of 100",
    ]  # fmt: skip


def test_stages_of_a_start_are_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Those that take seconds: from time to time and at their end."""
    caplog.set_level(logging.INFO, "jaxspec.progress")
    seconds = [0.0]
    with progress.bar(clock=lambda: seconds[0]) as report:
        for stage, step in (("compiling", 2.0), ("loading", 0.1)):
            for done in range(25):
                report(stage, done, 24)
                seconds[0] += step
    assert [record.message for record in caplog.records] == [
        "compiling: 2 of 24", "compiling: 17 of 24", "compiling: 24 of 24 in 48 s",
    ]  # fmt: skip


def test_a_text_tells_engines_apart(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxspec.progress")
    seconds = [0.0]
    with progress.bar("fcfs", clock=lambda: seconds[0]) as report:
        report("loading", 0, 1)
        seconds[0] = 4.0
        report("loading", 1, 1)
    assert [record.message for record in caplog.records] == ["fcfs: loading: 1 of 1 in 4 s"]


def test_lines_printed_below_a_bar_are_whole(tmp_path: Path) -> None:
    """On the terminal they are not wrapped, and a file that is standard output gets them."""
    line = "word " * 60
    script = f"from jaxspec.progress import progress\nwith progress('steps', 2): print({line!r})"
    for to_terminal in (True, False):
        ours, theirs = pty.openpty()
        with (tmp_path / "out").open("w") as file:
            out = theirs if to_terminal else file
            environment = {**os.environ, "COLUMNS": "40", "TERM": "xterm"}
            subprocess.run([sys.executable, "-c", script], stdout=out, stderr=theirs, env=environment, check=True)
        shown = os.read(ours, 1 << 16).decode()
        os.close(ours)
        os.close(theirs)
        assert "steps" in shown
        assert (line in shown) == to_terminal
        assert (line in (tmp_path / "out").read_text()) != to_terminal


def test_a_short_stage_prints_nothing(capsys):
    with progress.progress("simulations", 2) as advance:
        advance()
        advance()
    assert capsys.readouterr() == ("", "")
