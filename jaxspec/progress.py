"""Progress bars on standard error. Does not import JAX, because the load generator uses it too."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)

#: Where standard error is no terminal: seconds until the first line of progress, and between two.
_FIRST, _PAUSE = 3.0, 30.0
#: (stage, done, total). Repeats `jaxspec.step.warmup.Progress`, whose module imports JAX.
Report = Callable[[str, int, int], None]


@contextmanager
def bar(show: bool | str = True, clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """Gives a callback that reports progress of loading and compiling, with one bar per stage. A text as `show` stands
    before the stages.

    Where standard error is no terminal, the same are log lines: of stages that take seconds, from time to time and at
    their end. `clock`: monotonic seconds.
    """
    console, prefix = Console(stderr=True), f"{show}: " if isinstance(show, str) else ""
    if not show:
        yield lambda stage, done, total: None
        return
    if not console.is_terminal:
        log_lines = _StageLog(clock)
        yield lambda stage, done, total: log_lines.report(prefix + stage, done, total)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as display:
        task: TaskID | None = None

        def report(stage: str, done: int, total: int) -> None:
            nonlocal task
            if done == 0 or task is None:
                task = display.add_task(prefix + stage, total=total)
            display.update(task, completed=done)

        yield report


class _StageLog:
    """Logs the stages of a start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._begun, self._due = clock, 0.0, 0.0

    def report(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        if not done:
            self._begun, self._due = now, now + _FIRST
        elif done == total and now - self._begun >= _FIRST:
            log.info("%s: %d of %d in %.0f s", stage, done, total, now - self._begun)
        elif now >= self._due:
            self._due = now + _PAUSE
            log.info("%s: %d of %d", stage, done, total)


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
    """Shows one bar, starting at `done`, and removes it at the end. Gives a function that advances it by one.

    Where standard error is no terminal, a long stage has a line from time to time, and a short one none.
    """
    console = Console(stderr=True, soft_wrap=True)  # what is printed meanwhile goes through it, line by line
    if not console.is_terminal:
        yield _lines(what, total, done, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A standard output that is no terminal gets its lines itself, not through standard error.
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as display:
        task = display.add_task(what, total=total, completed=done)
        yield lambda: display.advance(task)


def _lines(what: str, total: int, done: int, console: Console) -> Callable[[], None]:
    """Returns a function that counts one more, and prints `what: done of total` from time to time."""
    due = time.monotonic() + _FIRST

    def advance() -> None:
        nonlocal done, due
        done += 1
        if time.monotonic() >= due:
            due = time.monotonic() + _PAUSE
            console.print(f"{what}: {done} of {total}", soft_wrap=True, markup=False, highlight=False)

    return advance
