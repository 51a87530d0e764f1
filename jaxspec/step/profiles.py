"""Measured run times of programs, stored on disk for later starts.

Times measured on a busy machine mislead all decisions that use them. So times are stored only if they are repeatable
and if no larger program is much faster than a smaller one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import jax

from jaxspec.models.load.files import replacing

log = logging.getLogger(__name__)

#: Seconds after which stored times expire.
KEPT = 7 * 24 * 3600
#: Runs per program, of which the median counts; attempts if the times are implausible.
SAMPLES, ROUNDS = 5, 3
#: Medians of the same program may differ by this factor; a larger program may be faster by this fraction.
_REPEATS, _NOISE = 1.3, 0.2
#: Differences below this many seconds are always plausible.
_JITTER = 2e-3


class Profile:
    """Run times of a set of programs. `seconds`: program name -> seconds (measured or guessed).

    A program is offered as soon as it can run. Unless its time was stored, `sample` runs it: first once, for a guess,
    then all programs alternately until every time is measured. Not thread-safe.
    """

    def __init__(
        self, what: str, names: Sequence[str], ordered: Sequence[tuple[str, str]] = (), path: Path | None = None,
        renew: bool = False, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`what`: name of the set, for messages. `ordered`: pairs (smaller, larger) of programs; the smaller takes no
        longer. `path`: file of stored times, None stores nothing. `renew`: do not read it."""
        self.what, self.names, self.ordered = what, list(names), list(ordered)
        self._path, self._clock = path, clock
        self.seconds: dict[str, float] = {}
        #: When the times were measured; None until then.
        self.measured: datetime | None = None
        #: Callbacks for when all times are measured.
        self.on_measured: list[Callable[[], None]] = []
        #: Callbacks for each program's first run, called with its name.
        self.on_guess: list[Callable[[str], None]] = []
        self._runs: dict[str, Callable[[], None]] = {}
        self._samples: dict[str, list[float]] = {}
        self._doubted: dict[str, list[float]] = {}  # samples of rounds that were measured again
        self._rounds = dict.fromkeys(names, 1)
        if path is not None and not renew:
            self._read(path)

    def offer(self, name: str, run: Callable[[], None], guess: float | None = None) -> None:
        """Report that a program can run. `run` runs it once and waits for it.

        `guess`: its estimated seconds; then its first run is not urgent.
        """
        self._runs[name] = run
        if self.measured is None and guess is not None:
            self.seconds[name] = guess

    @property
    def unknown(self) -> list[str]:
        """Offered programs without a measured or guessed time."""
        return [name for name in self._runs if name not in self.seconds]

    @property
    def pending(self) -> bool:
        """Whether `sample` has something to do."""
        return self.measured is None and (len(self._runs) == len(self.names) or bool(self.unknown))

    def sample(self) -> None:
        """Run one program once. Programs without a guess come first."""
        if unknown := self.unknown:
            self.seconds[unknown[0]] = self._time(unknown[0])
            for callback in self.on_guess:
                callback(unknown[0])
            return
        name = min(self.names, key=lambda name: len(self._samples.get(name, ())))
        self._samples.setdefault(name, []).append(self._time(name))
        if min(len(self._samples.get(name, ())) for name in self.names) >= SAMPLES:
            self._conclude()

    def guess(self) -> None:
        """Run all offered programs that have no time yet, once each.

        Guesses are stored too: a process that exits before all is measured saves the next start these runs.
        """
        if not self.unknown:
            return
        while self.unknown:
            self.sample()
        if self._path is not None and self.measured is None:
            self._write(self._path)

    def measure(self) -> dict[str, float]:
        """Call `sample` until all times are measured. Returns `seconds`."""
        while self.pending:
            self.sample()
        return self.seconds

    def _time(self, name: str) -> float:
        begun = self._clock()
        try:
            self._runs[name]()
        except Exception:
            del self._runs[name]  # never again: without a time a program is not used
            raise
        return max(self._clock() - begun, 1e-9)

    def _conclude(self) -> None:
        found = {name: median(self._samples[name]) for name in self.names}
        doubts = {**_unsteady(self._samples), **_disordered(found, self.ordered)}
        if again := [name for name in doubts if self._rounds[name] < ROUNDS]:
            log.info("%s: measuring %d programs again: %s", self.what, len(again), doubts[again[0]])
            for name in again:
                self._rounds[name] += 1
                self._doubted.setdefault(name, []).extend(self._samples.pop(name))
            return
        # On a machine that is always unsteady, the last round is no better than the others.
        found |= {name: median(self._doubted.get(name, []) + self._samples[name]) for name in doubts}
        self.seconds, self.measured = found, datetime.now(UTC)
        self._samples.clear()
        self._doubted.clear()
        if doubts:
            log.warning(
                "%s: times are implausible after %d attempts (%s), the machine seems busy. They are measured again "
                "at the next start.", self.what, ROUNDS, next(iter(doubts.values())),
            )  # fmt: skip
        elif self._path is not None:
            self._write(self._path)
        for callback in self.on_measured:
            callback()

    def _read(self, path: Path) -> None:
        try:
            if time.time() - path.stat().st_mtime > KEPT:
                return
            found = json.loads(path.read_text())
            seconds, when = found["seconds"], found["measured"]
            measured = None if when is None else datetime.fromisoformat(when)
            known = set(seconds) == set(self.names) if measured else set(seconds) <= set(self.names)
            if not known or not all(isinstance(v, float) for v in seconds.values()):
                raise ValueError("they are for other programs")
        except OSError:
            return
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.info("%s: the stored times in %s cannot be used: %s", self.what, path.name, error)
            return
        if reason := implausible(seconds, self.ordered):
            log.warning("%s: the stored times are implausible (%s), measuring again", self.what, reason)
            return
        self.seconds, self.measured = seconds, measured

    def _write(self, path: Path) -> None:
        when = self.measured and self.measured.isoformat(timespec="seconds")
        content = {"what": self.what, "measured": when, "seconds": self.seconds}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:  # another process may be reading
                file.write_text(json.dumps(content, indent=1))
        except OSError as error:
            log.warning("%s: cannot store the measured times: %s", self.what, error)


@dataclass(frozen=True)
class ProfileStore:
    """Folder of stored times; None stores nothing. `renew`: ignore stored times and measure again. `clock`: seconds."""

    folder: Path | None = None
    renew: bool = False
    clock: Callable[[], float] = time.perf_counter

    def open(self, what: str, key: Any, names: Sequence[str], ordered: Sequence[tuple[str, str]] = ()) -> Profile:
        """The profile of the programs identified by the `repr` of `key`, on this device and JAX version.

        The order of `names` does not matter.
        """
        digest = hashlib.sha256(repr((what, key, sorted(names), device(), jax.__version__)).encode()).hexdigest()
        path = self.folder / f"{digest[:16]}.json" if self.folder else None
        return Profile(what, names, ordered, path, self.renew, self.clock)


#: Stores nothing.
NOT_KEPT = ProfileStore()


def implausible(seconds: Mapping[str, float], ordered: Sequence[tuple[str, str]]) -> str | None:
    """Why these times cannot be right, or None if they are plausible."""
    for name, taken in seconds.items():
        if not 0 < taken < float("inf"):
            return f"{name} takes {taken} s"
    return next(iter(_disordered(seconds, ordered).values()), None)


def _disordered(seconds: Mapping[str, float], ordered: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Programs that are slower than a larger one, or faster than a smaller one -> reason."""
    found = {}
    for smaller, larger in ordered:
        if smaller not in seconds or larger not in seconds:
            continue
        if seconds[larger] < (1 - _NOISE) * seconds[smaller] - _JITTER:
            reason = f"{larger} takes {1e3 * seconds[larger]:.3g} ms, {smaller} {1e3 * seconds[smaller]:.3g} ms"
            found[smaller] = found[larger] = reason
    return found


def _unsteady(samples: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Programs whose time changed between earlier and later runs -> reason."""
    found = {}
    for name, taken in samples.items():
        half = len(taken) // 2 + 1
        early, late = median(taken[:half]), median(taken[-half:])
        if max(early, late) > _REPEATS * min(early, late) + _JITTER:
            found[name] = f"{name} takes {1e3 * early:.3g} ms, later {1e3 * late:.3g} ms"
    return found


def device() -> str:
    """Name of the device: the accelerator's kind, or the CPU's name, usable cores and thread settings."""
    first = jax.devices()[0]
    if first.platform != "cpu":
        return first.device_kind
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = [os.environ.get(limit, "") for limit in ("JAXSPEC_THREADS", "XLA_FLAGS")]
    return f"{name or platform.processor() or platform.machine()} × {cores} {' '.join(limits)}".rstrip()
