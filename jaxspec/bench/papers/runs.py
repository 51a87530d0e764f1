"""Independent runs of an experiment, in processes, with results kept in a file so that a stopped experiment goes on."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from jaxspec.progress import progress

#: Results of a run: what JSON can hold.
Result = Mapping[str, Any]
Task = TypeVar("Task")
Data = TypeVar("Data")

_ROOT = Path(__file__).parents[3]
#: Source files and presets on which results depend.
_SOURCES = "sched/**/*.py", "jaxspec/bench/**/*.py", "jaxspec/draft/*.py", "jaxspec/config.py", "configs/*.yaml"


class Runs:
    """Runs tasks and keeps their results in the file at `path`, one line each.

    A kept result is used again only if the task, its data and the source code are the same. `processes`: number of
    worker processes; 1: all tasks run in this one.
    """

    def __init__(self, path: Path, processes: int = 1) -> None:
        self._path, self._processes = path, processes
        self._kept: dict[str, Any] = {}
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            self._kept = dict(_parsed(line) for line in lines)
        self._source = _digest(*(file.read_bytes() for file in _source_files()))

    def results(
        self, what: str, run: Callable[[Data, Task], Result], data: Data, tasks: Iterable[Task]
    ) -> dict[Task, Result]:
        """`{task: run(data, task)}`, in the order of the tasks, with a progress bar named `what`.

        `run` is a function of a module, because other processes call it. Tasks are hashable, and their `repr` has all
        that distinguishes them.
        """
        wanted = list(dict.fromkeys(tasks))
        common = _digest(self._source, f"{run.__module__}.{run.__qualname__}".encode(), pickle.dumps(data))
        keys = {task: _digest(common, repr(task).encode()).hex() for task in wanted}
        missing = [task for task in wanted if keys[task] not in self._kept]
        with progress(what, len(wanted), len(wanted) - len(missing)) as advance:

            def keep(task: Task, result: Result) -> None:
                self._keep(keys[task], result)
                advance()

            if self._processes == 1 or len(missing) < 2:
                for task in missing:
                    keep(task, run(data, task))
            else:
                self._run_in_processes(run, data, missing, keep)
        return {task: self._kept[keys[task]] for task in wanted}

    def _run_in_processes(
        self, run: Callable[[Data, Task], Result], data: Data, tasks: Iterable[Task],
        keep: Callable[[Task, Result], None],
    ) -> None:  # fmt: skip
        # "spawn": a forked copy of a process in which JAX runs can hang.
        with ProcessPoolExecutor(self._processes, get_context("spawn")) as pool:
            futures: dict[Future[Result], Task] = {pool.submit(run, data, task): task for task in tasks}
            try:
                for future in as_completed(futures):
                    keep(futures[future], future.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _keep(self, key: str, result: Result) -> None:
        line = json.dumps([key, result])
        self._kept[key] = json.loads(line)[1]  # as read from the file: keys are text, tuples are lists
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _parsed(line: str) -> tuple[str, Any]:
    """(key, result) of a line; a line that was cut off by a crash is no result."""
    try:
        key, result = json.loads(line)
    except ValueError:
        return "", None
    return key, result


def _source_files() -> list[Path]:
    return sorted(file for pattern in _SOURCES for file in _ROOT.glob(pattern))


def _digest(*parts: bytes) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8) + part)
    return found.digest()
