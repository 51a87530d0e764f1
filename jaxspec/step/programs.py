"""A set of programs, one per batch shape: compiled ahead of time, and ready once they are compiled and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from jaxspec.step.batch import BatchShape
from jaxspec.step.profiles import ProfileStore
from jaxspec.step.warmup import CompileJob

#: What is compiled for a shape: a program, or several.
P = TypeVar("P")


class Programs(Generic[P]):
    """Compiled programs by batch shape, with the measured times of their runs in `profile`.

    A shape is `ready` for requests once its program is compiled and all its runs have a time, measured or guessed.
    Not thread-safe, but the jobs' `compile` may run in any thread.
    """

    def __init__(
        self, what: str, key: Any, runs: Mapping[BatchShape, Mapping[str, Callable[[], None]]],
        compile: Callable[[BatchShape], P], store: ProfileStore, ordered: Sequence[tuple[str, str]] = (),
        guess: Callable[[BatchShape], float | None] = lambda shape: None,
    ) -> None:  # fmt: skip
        """`what`, `key`, `ordered`: see `ProfileStore.open`. `runs`: for each shape, in the order of `ready`, the runs
        to time by name; a run waits for its end. `guess`: seconds of a shape just compiled, if its first run need not
        come before requests."""
        self.profile = store.open(what, key, [name for of_shape in runs.values() for name in of_shape], ordered)
        self.profile.on_guess.append(lambda name: self._update())
        #: Shapes that requests may use.
        self.ready: list[BatchShape] = []
        #: Called with each shape that becomes ready.
        self.on_ready: Callable[[BatchShape], None] = lambda shape: None
        self._runs, self._compile, self._guess = runs, compile, guess
        self._programs: dict[BatchShape, P] = {}

    def __getitem__(self, shape: BatchShape) -> P:
        return self._programs[shape]

    def values(self) -> Iterable[P]:
        """All compiled programs."""
        return self._programs.values()

    def job(self, name: str, shape: BatchShape) -> CompileJob:
        """The job that compiles a shape's program. `name` is for progress and logs."""
        return CompileJob(name, partial(self._compile, shape), partial(self._adopt, shape))

    def _adopt(self, shape: BatchShape, program: P) -> None:
        self._programs[shape] = program
        guess = self._guess(shape)
        for name, run in self._runs[shape].items():
            self.profile.offer(name, run, guess)
        self._update()

    def _update(self) -> None:
        timed, before = self.profile.seconds.keys(), self.ready
        self.ready = [s for s, runs in self._runs.items() if s in self._programs and runs.keys() <= timed]
        for shape in self.ready:
            if shape not in before:
                self.on_ready(shape)
