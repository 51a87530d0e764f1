"""The pages' commands run, small: each as it is written, on the files of `doc_data` and a tiny model. Those that other
tests run are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import doc_data
from helpers.doc_commands import Command, commands
from helpers.doc_runs import dry, run, sends_load, size_of
from helpers.doc_sizes import FROM_NOTHING, RUNS, SEQUENCES
from helpers.paths import CONFIGS


def singles() -> Iterator[Command]:
    """Each different command once, and what `make serve` starts."""
    seen = set()
    for command in commands():
        started = dry(command) if command.begins("make serve") else [command]
        for own in started:
            key = (own.called, *own.environment.items())
            if size_of(own) and key not in seen and own.page not in SEQUENCES and not sends_load(own):
                seen.add(key)
                yield own


def marked(command: Command):
    size = size_of(command)
    assert size
    return pytest.param(command, id=command.place, marks=[pytest.mark.slow] if size.slow and not size.by else [])


@pytest.mark.parametrize("command", [marked(command) for command in singles()])
def test_command(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doc_data.write(tmp_path)
    doc_data.answered(tmp_path)
    run(command, tmp_path, monkeypatch)


@pytest.mark.parametrize("by", sorted({run.by for run in RUNS if run.by}))
def test_a_command_that_is_only_read_is_run_by_a_test(by: str) -> None:
    file, _, name = by.partition("::")
    assert f"\ndef {name}(" in (Path(__file__).parents[1] / file).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(SEQUENCES))
def test_commands_of_a_page_build_on_each_other(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in FROM_NOTHING:
        (tmp_path / "configs").symlink_to(CONFIGS)
    else:
        doc_data.write(tmp_path)
    own = [command for command in commands() if command.page == page and size_of(command)]
    assert own
    for command in own:
        with monkeypatch.context() as patch:
            run(command, tmp_path, patch)
