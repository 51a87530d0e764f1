"""Progress bars on standard error. Nothing here imports JAX: the load generator uses them too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

#: (stage, done, total): `jaxspec.step.warmup.Progress`, said again since that module imports JAX.
Report = Callable[[str, int, int], None]


@contextmanager
def bar(show: bool = True) -> Iterator[Report]:
    """A callback for loading and compiling; each stage with a total starts a bar of its own."""
    if not show:
        yield lambda stage, done, total: None
        return
    columns = TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as drawn:
        task: TaskID | None = None

        def report(stage: str, done: int, total: int) -> None:
            nonlocal task
            if done == 0 or task is None:
                task = drawn.add_task(stage, total=total)
            drawn.update(task, completed=done, description=stage if done < total else None)

        yield report


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
    """One bar, gone when it is full; gives the function that moves it on by one from `done`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(what, total=total, completed=done)
        yield lambda: drawn.advance(task)
