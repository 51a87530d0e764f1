"""Progress where standard error is no terminal."""

from __future__ import annotations

import logging

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


def test_a_short_stage_prints_nothing(capsys):
    with progress.progress("simulations", 2) as advance:
        advance()
        advance()
    assert capsys.readouterr() == ("", "")
