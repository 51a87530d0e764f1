"""Watches what disturbs a measurement: time that the hypervisor steals, and load of other processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Shares of the CPU time of all cores, from 0 to 1: stolen by the hypervisor, and used by other processes."""

    steal: float
    foreign: float

    @property
    def worst(self) -> float:
        return max(self.steal, self.foreign)


class Watch:
    """Measures the disturbance from now on. This process, and the trees of processes `pids`, disturb nothing.

    The kernel counts CPU time in ticks of 10 ms, so spans under about half a second are read coarsely. Systems without
    steal time (all but Linux) report 0.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._begin = self._read()

    def read(self) -> Disturbance:
        """The disturbance since the start."""
        wall, busy, stolen, own = (now - then for now, then in zip(self._read(), self._begin, strict=True))
        capacity = max(wall, 1e-9) * (psutil.cpu_count() or 1)
        return Disturbance(max(0.0, stolen) / capacity, max(0.0, busy - own) / capacity)

    def _read(self) -> tuple[float, float, float, float]:
        """Seconds: clock; CPU time of all processes; stolen time; CPU time of the measured processes."""
        times, mine = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        stolen = getattr(times, "steal", 0.0)
        # Time of virtual machines that run here is in `user` and `nice` already.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        own = mine.user + mine.system + sum(map(cpu_seconds, self._pids))
        return time.monotonic(), sum(times) - idle - stolen - guests, stolen, own


def tree(pid: int) -> Iterator[psutil.Process]:
    """A process and all its descendants; nothing if it has ended."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        yield root
        yield from root.children(recursive=True)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants, ended ones included."""
    total = 0.0
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def resident_bytes(pid: int) -> int:
    """Resident memory (RSS) of a process and its descendants; pages that they share count once for each."""
    total = 0
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total
