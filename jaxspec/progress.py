"""Progress bars on standard error. Does not import JAX, because the load generator uses it too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

#: (stage, done, total). Repeats `jaxspec.step.warmup.Progress`, whose module imports JAX.
Report = Callable[[str, int, int], None]


@contextmanager
def bar(show: bool = True) -> Iterator[Report]:
    """Gives a callback that reports progress of loading and compiling, with one bar per stage."""
    if not show:
        yield lambda stage, done, total: None
        return
    columns = TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as display:
        task: TaskID | None = None

        def report(stage: str, done: int, total: int) -> None:
            nonlocal task
            if done == 0 or task is None:
                task = display.add_task(stage, total=total)
            display.update(task, completed=done, description=stage if done < total else None)

        yield report


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
    """Shows one bar, starting at `done`, and removes it at the end. Gives a function that advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(what, total=total, completed=done)
        yield lambda: display.advance(task)
