"""A progress bar for loading and compiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jaxspec.step.executor import Progress as Report
from jaxspec.step.executor import silent


@contextmanager
def bar(show: bool = True) -> Iterator[Report]:
    """A `Progress` callback that draws on standard error; each stage with a total starts a bar of its own."""
    if not show:
        yield silent
        return
    columns = TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task: TaskID | None = None

        def report(stage: str, done: int, total: int) -> None:
            nonlocal task
            if done == 0 or task is None:
                task = progress.add_task(stage, total=total)
            progress.update(task, completed=done, description=stage if done < total else None)

        yield report
