"""Measured times of programs, kept from one start to the next: the same programs on the same device take the same time.

A busy machine gives times that mislead every decision built on them. So times are only believed, and kept, if they
repeat and if a larger program is not much faster than a smaller one.
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

#: Seconds for which times are kept.
KEPT = 7 * 24 * 3600
#: Runs of each program that its time is the median of, and how often at most they are taken where it is implausible.
SAMPLES, ROUNDS = 5, 3
#: Two medians of the same program may differ by this factor, and a larger program may seem faster by this share.
_REPEATS, _NOISE = 1.3, 0.2
#: Differences below this many seconds are never held against a measurement.
_JITTER = 2e-3


class Profile:
    """Seconds by the name of a program. `seconds` has what is known so far.

    A program is offered when it can be run. Unless its time was stored, `sample` runs it: once soon, for a first guess,
    and then all of them in turns, until every time is measured. Not thread-safe.
    """

    def __init__(
        self, what: str, names: Sequence[str], ordered: Sequence[tuple[str, str]] = (), path: Path | None = None,
        renew: bool = False, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`what`: the programs, for messages. `ordered`: pairs of names of which the first takes no longer.
        `path`: the file of an earlier start, None keeps nothing; with `renew` it is not read."""
        self.what, self.names, self.ordered = what, list(names), list(ordered)
        self._path, self._clock = path, clock
        self.seconds: dict[str, float] = {}
        #: When the times were measured, None while they are not.
        self.measured: datetime | None = None
        #: Called when all times have been measured.
        self.on_measured: list[Callable[[], None]] = []
        #: Called with each program whose first run is over.
        self.on_guess: list[Callable[[str], None]] = []
        self._runs: dict[str, Callable[[], None]] = {}
        self._samples: dict[str, list[float]] = {}
        self._rounds = dict.fromkeys(names, 1)
        if path is not None and not renew:
            self._read(path)

    def offer(self, name: str, run: Callable[[], None], guess: float | None = None) -> None:
        """`run` runs the program once and waits for it; with a `guess` of its seconds that can wait."""
        self._runs[name] = run
        if self.measured is None and guess is not None:
            self.seconds[name] = guess

    @property
    def unknown(self) -> list[str]:
        """Programs that were offered, of whose time there is not even a guess."""
        return [name for name in self._runs if name not in self.seconds]

    @property
    def pending(self) -> bool:
        """Whether `sample` has something to do."""
        return self.measured is None and (len(self._runs) == len(self.names) or bool(self.unknown))

    def sample(self) -> None:
        """Run one program once, one without even a guess first."""
        if unknown := self.unknown:
            self.seconds[unknown[0]] = self._time(unknown[0])
            for told in self.on_guess:
                told(unknown[0])
            return
        name = min(self.names, key=lambda name: len(self._samples.get(name, ())))
        self._samples.setdefault(name, []).append(self._time(name))
        if min(len(self._samples.get(name, ())) for name in self.names) >= SAMPLES:
            self._conclude()

    def guess(self) -> None:
        """Run what was offered and has no time yet. The guesses are kept too: a process may end before all is measured,
        and the next one need not guess again."""
        if not self.unknown:
            return
        while self.unknown:
            self.sample()
        if self._path is not None and self.measured is None:
            self._write(self._path)

    def measure(self) -> dict[str, float]:
        """`sample` until all is measured, if it is not yet. -> `seconds`."""
        while self.pending:
            self.sample()
        return self.seconds

    def _time(self, name: str) -> float:
        begun = self._clock()
        self._runs[name]()
        return max(self._clock() - begun, 1e-9)

    def _conclude(self) -> None:
        found = {name: median(self._samples[name]) for name in self.names}
        doubts = {**_unsteady(self._samples), **_disordered(found, self.ordered)}
        if again := [name for name in doubts if self._rounds[name] < ROUNDS]:
            log.info("%s: %d programs are measured again: %s", self.what, len(again), doubts[again[0]])
            for name in again:
                self._rounds[name] += 1
                del self._samples[name]
            return
        self.seconds, self.measured = found, datetime.now(UTC)
        self._samples.clear()
        if doubts:
            log.warning(
                "%s: times stay implausible after %d tries (%s). The machine seems busy. They are measured again "
                "at the next start.", self.what, ROUNDS, next(iter(doubts.values())),
            )  # fmt: skip
        elif self._path is not None:
            self._write(self._path)
        for told in self.on_measured:
            told()

    def _read(self, path: Path) -> None:
        try:
            if time.time() - path.stat().st_mtime > KEPT:
                return
            found = json.loads(path.read_text())
            seconds, when = found["seconds"], found["measured"]
            measured = None if when is None else datetime.fromisoformat(when)
            known = set(seconds) == set(self.names) if measured else set(seconds) <= set(self.names)
            if not known or not all(isinstance(v, float) for v in seconds.values()):
                raise ValueError("it is of other programs")
        except OSError:
            return
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.info("%s: the stored times in %s cannot be used: %s", self.what, path.name, error)
            return
        if reason := implausible(seconds, self.ordered):
            log.warning("%s: the stored times are implausible (%s) and are measured again", self.what, reason)
            return
        self.seconds, self.measured = seconds, measured

    def _write(self, path: Path) -> None:
        when = self.measured and self.measured.isoformat(timespec="seconds")
        told = {"what": self.what, "measured": when, "seconds": self.seconds}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:  # another process may be looking
                file.write_text(json.dumps(told, indent=1))
        except OSError as error:
            log.warning("%s: the measured times are not kept: %s", self.what, error)


@dataclass(frozen=True)
class ProfileStore:
    """The folder of measured times; None keeps nothing. With `renew`, all are measured again."""

    folder: Path | None = None
    renew: bool = False

    def open(self, what: str, key: Any, names: Sequence[str], ordered: Sequence[tuple[str, str]] = ()) -> Profile:
        """The times of programs that `key` (whatever its `repr` tells apart) identifies, on this device.

        Neither the order of `names` matters nor when this is called.
        """
        digest = hashlib.sha256(repr((what, key, sorted(names), device(), jax.__version__)).encode()).hexdigest()
        path = self.folder / f"{digest[:16]}.json" if self.folder else None
        return Profile(what, names, ordered, path, self.renew)


#: A store that keeps nothing.
NOT_KEPT = ProfileStore()


def implausible(seconds: Mapping[str, float], ordered: Sequence[tuple[str, str]]) -> str | None:
    """Why these times cannot be right, None if they can."""
    for name, taken in seconds.items():
        if not 0 < taken < float("inf"):
            return f"{name} takes {taken} s"
    return next(iter(_disordered(seconds, ordered).values()), None)


def _disordered(seconds: Mapping[str, float], ordered: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Programs whose times do not fit each other, each with what is wrong."""
    found = {}
    for smaller, larger in ordered:
        if smaller not in seconds or larger not in seconds:
            continue
        if seconds[larger] < (1 - _NOISE) * seconds[smaller] - _JITTER:
            reason = f"{larger} takes {1e3 * seconds[larger]:.3g} ms, {smaller} {1e3 * seconds[smaller]:.3g} ms"
            found[smaller] = found[larger] = reason
    return found


def _unsteady(samples: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Programs whose time changed between the earlier and the later runs, each with how."""
    found = {}
    for name, taken in samples.items():
        half = len(taken) // 2 + 1
        early, late = median(taken[:half]), median(taken[-half:])
        if max(early, late) > _REPEATS * min(early, late) + _JITTER:
            found[name] = f"{name} takes {1e3 * early:.3g} ms and then {1e3 * late:.3g} ms"
    return found


def device() -> str:
    """What the programs run on: the accelerator's kind, or the CPU's name and how much of it we may use."""
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
