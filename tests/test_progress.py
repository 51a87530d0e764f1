"""Progress where standard error is no terminal."""

from __future__ import annotations

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


def test_a_short_stage_prints_nothing(capsys):
    with progress.progress("simulations", 2) as advance:
        advance()
        advance()
    assert capsys.readouterr() == ("", "")
