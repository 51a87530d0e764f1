"""Compiling programs ahead of time, in the background too, and counting compilations."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

import jax.monitoring

from jaxspec.step.profiles import Profile

_here = threading.local()


class CompileCounter:
    """`count` are the compilations so far, without those of `planned` blocks."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and not getattr(_here, "planned", False):
            self.count += 1


@contextmanager
def planned() -> Iterator[None]:
    """Compilations of this thread in the block are ahead of time: no request waits for them."""
    before, _here.planned = getattr(_here, "planned", False), True
    try:
        yield
    finally:
        _here.planned = before


@lru_cache(maxsize=1)
def compile_counter() -> CompileCounter:
    """The process's counter. JAX's listeners are per process and stay registered, so there is one."""
    counter = CompileCounter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    return counter


log = logging.getLogger(__name__)

#: (stage, done, total)
Progress = Callable[[str, int, int], None]
#: While requests run, the background thread pauses this many times as long as its last job took.
_PAUSES = 4.0
#: Seconds between two looks whether requests run.
_LOOK = 0.05
#: Seconds without requests after which the engine's thread begins to measure.
_QUIET = 0.5
#: While requests run, a program that was never run is run once; then for this many times as long none is.
_RARELY = 20.0


def silent(stage: str, done: int, total: int) -> None:
    """No progress report."""


@dataclass(frozen=True, eq=False)
class CompileJob:
    """One program: `compile` may run in any thread, `adopt` takes its result in the engine's thread and runs nothing.
    `failed` is called there instead where it could not be compiled."""

    name: str
    compile: Callable[[], Any]
    adopt: Callable[[Any], None] = lambda program: None
    failed: Callable[[], None] = lambda: None


@dataclass(order=True)
class _Entry:
    rank: int
    number: int
    job: CompileJob = field(compare=False)


class WarmUp:
    """Compiles programs: `compile_now` at once, `compile_later` in a background thread if `background` is set.

    Call `compile_now` and `adopt_ready` from the engine's thread (or the one that builds the engine). If a background
    job fails, the engine serves without its program.
    """

    def __init__(
        self, background: bool = False, progress: Progress = silent, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.background, self._progress, self._clock = background, progress, clock
        #: Programs compiled so far, and in all.
        self.ready = self.total = 0
        self._waiting: list[_Entry] = []
        self._compiled: deque[tuple[CompileJob, Any]] = deque()
        self._profiles: list[Profile] = []
        self._busy: Callable[[], bool] = lambda: False
        self._wake: Callable[[], None] = lambda: None
        self._closing = threading.Event()
        self._warm = threading.Event()
        self._thread: threading.Thread | None = None
        self._quiet_since: float | None = None
        self._not_before = 0.0  # when a program may be run beside requests again
        self._open = 0  # jobs of the background that are not adopted yet

    def compile_now(self, stage: str, jobs: Sequence[CompileJob]) -> None:
        """Compile and adopt these now, several at once: XLA compiles without the interpreter lock."""
        self.total += len(jobs)
        self._progress(stage, 0, len(jobs))
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            futures = {pool.submit(_compile, job): job for job in jobs}
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                self._progress(futures[future].name, done, len(jobs))
        for future, job in futures.items():
            job.adopt(future.result())
            self.ready += 1

    def compile_later(self, stage: str, jobs: Sequence[CompileJob], rank: int = 0) -> None:
        """Compile these in the background, lower ranks first; without a background, now."""
        if not self.background:
            return self.compile_now(stage, jobs)
        for job in jobs:
            heappush(self._waiting, _Entry(rank, self.total, job))
            self.total += 1
            self._open += 1

    def measure(self, profile: Profile) -> None:
        """See that the programs of `profile`, whose jobs have been given, are measured."""
        if self.background:
            self._profiles.append(profile)
        else:
            profile.measure()

    def start(self, busy: Callable[[], bool], wake: Callable[[], None]) -> None:
        """Begin with the background jobs. `busy`: whether requests run or wait. `wake` is called when there is
        something for `adopt_ready`."""
        self._busy, self._wake = busy, wake
        if not self._open:
            self._check_warm()
            return
        log.info("%d more programs are prepared in the background", self._open)
        self._thread = threading.Thread(target=self._run, name="jaxspec-warm-up", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin no further job."""
        self._closing.set()

    def close(self, timeout: float = 30.0) -> None:
        """Stop, and wait for the job under way: a thread that compiles must not outlive the interpreter."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all that can be compiled is, and is measured. -> whether that is so."""
        return self._warm.wait(timeout)

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def adopt_ready(self, busy: bool) -> float:
        """Adopt compiled programs and run at most one of them to measure it.

        An engine that has been idle for a while measures any program; a `busy` one, now and then, a program without
        any measurement. -> seconds until there is more to do if nothing else happens; infinity if there is nothing.
        """
        if self._warm.is_set():
            return float("inf")
        while self._compiled:
            self._adopt(*self._compiled.popleft())
        now = self._clock()
        if busy or self._quiet_since is None:
            self._quiet_since = None if busy else now
        wait = float("inf")
        if busy:
            unknown = next((p for p in self._profiles if p.unknown), None)
            if unknown is not None and now >= self._not_before:
                unknown.sample()
                ended = self._clock()
                self._not_before = ended + _RARELY * (ended - now)
        elif (pending := next((p for p in self._profiles if p.pending), None)) is not None:
            assert self._quiet_since is not None
            wait = max(0.0, self._quiet_since + _QUIET - now)
            if not wait:
                pending.sample()
        self._check_warm()
        return wait

    def _adopt(self, job: CompileJob, program: Any) -> None:
        self._open -= 1
        if program is None:
            job.failed()
            return
        job.adopt(program)
        self.ready += 1

    def _check_warm(self) -> None:
        if not self._open and not any(p.pending for p in self._profiles) and not self._warm.is_set():
            if self._thread is not None:
                log.info("all %d programs are ready", self.ready)
            self._warm.set()

    # -- the background thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        took = 0.0
        while self._waiting and not self._closing.is_set():
            paused = 0.0
            while self._busy() and paused < _PAUSES * took and not self._closing.wait(_LOOK):
                paused += _LOOK
            if self._closing.is_set():
                return
            job, begun = heappop(self._waiting).job, time.perf_counter()
            program = None
            try:
                program = _compile(job)
                program = True if program is None else program
            except Exception:
                log.exception("%s could not be compiled; the engine serves without it", job.name)
            took = time.perf_counter() - begun
            self._compiled.append((job, program))
            self._wake()


def _compile(job: CompileJob) -> Any:
    with planned():
        return job.compile()
