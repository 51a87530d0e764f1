"""Compiles programs ahead of time and measures them, at the start or in a background thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

from jaxspec.compilation import planned, return_free_memory
from jaxspec.step.profiles import Profile

log = logging.getLogger(__name__)

#: Progress callback: (stage, done, total).
Progress = Callable[[str, int, int], None]
#: While requests run, the background thread sleeps this many times the duration of its last job.
_PAUSE_FACTOR = 4.0
#: Seconds between checks whether requests run.
_POLL = 0.05
#: Seconds without requests after which the engine's thread starts to measure programs.
_QUIET = 0.5
#: While requests run, unmeasured programs run one at a time, at intervals of this many times their duration.
_BUSY_INTERVAL = 20.0


def silent(stage: str, done: int, total: int) -> None:
    """No progress report."""


@dataclass(frozen=True, eq=False)
class CompileJob:
    """One program to compile.

    `compile` may run in any thread. `adopt` receives its result in the engine's thread and must not run the program.
    `failed` is called there instead if compilation fails.
    """

    name: str
    compile: Callable[[], Any]
    adopt: Callable[[Any], None] = lambda program: None
    failed: Callable[[], None] = lambda: None


class WarmUp:
    """Compiles programs: `compile_now` immediately, `compile_later` in a background thread if `background` is set.

    Call `compile_now` and `adopt_ready` from the engine's thread, or from the thread that builds the engine. If a
    background job fails, the engine serves without its program.
    """

    def __init__(
        self, background: bool = False, progress: Progress = silent, clock: Callable[[], float] = time.monotonic,
        cached: bool = False,
    ) -> None:  # fmt: skip
        """`cached`: compiled programs are kept for later starts, and the progress says so."""
        self.background, self._progress, self._clock, self._cached = background, progress, clock, cached
        #: Programs adopted so far, and programs in total.
        self.ready = self.total = 0
        self._waiting: list[tuple[int, int, CompileJob]] = []  # heap of (rank, number, job)
        self._compiled: deque[tuple[Callable[[], None], bool]] = deque()  # (adopt or failed, whether it is compiled)
        self._profiles: list[Profile] = []
        self._busy: Callable[[], bool] = lambda: False
        self._wake: Callable[[], None] = lambda: None
        self._closing = threading.Event()
        self._warm = threading.Event()
        self._thread: threading.Thread | None = None
        self._quiet_since: float | None = None
        self._not_before = 0.0  # earliest time to run a program while requests run
        self._open = 0  # background jobs that are not adopted yet

    def compile_now(self, stage: str, jobs: Sequence[CompileJob]) -> None:
        """Compile and adopt `jobs`, in several threads: XLA compiles without the GIL."""
        self.total += len(jobs)
        stage += ", cached for later starts" if self._cached else ""
        self._progress(stage, 0, len(jobs))
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            futures = {pool.submit(_compile, job): job for job in jobs}
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                self._progress(stage, done, len(jobs))
        for future, job in futures.items():
            job.adopt(future.result())
            self.ready += 1
        return_free_memory()

    def compile_later(self, stage: str, jobs: Sequence[CompileJob], rank: int = 0) -> None:
        """Compile `jobs` in the background, lower ranks first. Without a background thread, compile them now."""
        if not self.background:
            return self.compile_now(stage, jobs)
        for job in jobs:
            heappush(self._waiting, (rank, self.total, job))
            self.total += 1
            self._open += 1

    def measure(self, profile: Profile) -> None:
        """Measure the programs of `profile`, now or in the background. Their jobs must have been submitted."""
        if self.background:
            self._profiles.append(profile)
        else:
            profile.measure()

    def start(self, busy: Callable[[], bool], wake: Callable[[], None]) -> None:
        """Start the background jobs.

        `busy`: whether requests are running or waiting. `wake` is called when `adopt_ready` has something to do.
        """
        self._busy, self._wake = busy, wake
        if not self._open:
            self._check_warm()
            return
        log.info("compiling %d more programs in the background", self._open)
        self._thread = threading.Thread(target=self._run, name="jaxspec-warm-up", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Start no further job."""
        self._closing.set()

    def close(self, timeout: float = 30.0) -> None:
        """Stop, and wait for the running job: a compiling thread must not outlive the interpreter."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all programs are compiled (or failed) and measured. Returns False on timeout (seconds)."""
        return self._warm.wait(timeout)

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def adopt_ready(self, busy: bool, settle: Callable[[], None] = lambda: None) -> float:
        """Adopt compiled programs and run at most one program to measure it; `settle` is called before that, and waits
        for what runs on the device.

        If the engine has been idle for a while, any program is measured. If it is `busy`, only programs without any
        measurement are, and rarely. Returns the seconds until the next call is useful, infinity if none is.
        """
        if self._warm.is_set():
            return float("inf")
        while self._compiled:
            finish, compiled = self._compiled.popleft()
            finish()
            self._open -= 1
            self.ready += compiled
        now = self._clock()
        if busy or self._quiet_since is None:
            self._quiet_since = None if busy else now
        wait = float("inf")
        if busy:
            unknown = next((p for p in self._profiles if p.unknown), None)
            if unknown is not None and now >= self._not_before:
                settle()
                now = self._clock()
                unknown.sample()
                ended = self._clock()
                self._not_before = ended + _BUSY_INTERVAL * (ended - now)
        elif (pending := next((p for p in self._profiles if p.pending), None)) is not None:
            assert self._quiet_since is not None
            wait = max(0.0, self._quiet_since + _QUIET - now)
            if not wait:
                pending.sample()
        self._check_warm()
        return wait

    def _check_warm(self) -> None:
        if not self._open and not any(p.pending for p in self._profiles) and not self._warm.is_set():
            if self._thread is not None:
                log.info("all %d programs are compiled", self.ready)
            self._warm.set()

    # -- the background thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        last_duration = 0.0
        while self._waiting and not self._closing.is_set():
            paused = 0.0
            while self._busy() and paused < _PAUSE_FACTOR * last_duration and not self._closing.wait(_POLL):
                paused += _POLL
            if self._closing.is_set():
                return
            (_, _, job), started = heappop(self._waiting), time.perf_counter()
            try:
                finish, compiled = partial(job.adopt, _compile(job)), True
            except Exception:
                log.exception("%s could not be compiled; the engine serves without it", job.name)
                finish, compiled = job.failed, False
            return_free_memory()
            last_duration = time.perf_counter() - started
            self._compiled.append((finish, compiled))
            self._wake()


def _compile(job: CompileJob) -> Any:
    with planned():
        return job.compile()
