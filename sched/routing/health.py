"""Health of replicas: slow and silent ones are taken out, and come back on probation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from jaxspec.sched.routing.replica import Replica
from jaxspec.sched.routing.report import ReplicaReport


class HealthState(Enum):
    #: Takes requests.
    HEALTHY = "healthy"
    #: Takes none.
    OUT = "out"
    #: Was out and takes one request at a time, until enough of them went well.
    PROBATION = "probation"


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Seconds unless said otherwise. Raises `ValueError` naming what is out of range."""

    #: A replica whose report is older is silent and taken out. Once it reports again it is treated like a slow one.
    silent_after: float = 3.0
    #: A replica is slow if its seconds per step or per prompt token, or its TTFTs relative to what was expected, are
    #: more than this many times the median of the others. TTFTs alone would blame a replica for its load.
    slow_factor: float = 3.0
    #: Requests from which on its TTFTs count.
    least_answers: int = 5
    #: How long a replica stays out before its probation.
    out_for: float = 10.0
    #: Requests of a probation that must go well.
    probation_requests: int = 3
    #: Share of the replicas that may be out because they are slow: were it all, the rest would become slow by their
    #: requests. Silent ones count for nothing.
    most_out: float = 0.34

    def __post_init__(self) -> None:
        for name in ("silent_after", "slow_factor", "out_for", "least_answers", "probation_requests"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.slow_factor > 1 or not 0 <= self.most_out < 1:
            raise ValueError("slow_factor must be above 1, and most_out at least 0 and below 1")


@dataclass(slots=True)
class _Record:
    state: HealthState = HealthState.HEALTHY
    since: float = 0.0


class Health:
    """Decides which replicas may get requests. `check` from time to time, such as after a round of reports; then
    `available`."""

    def __init__(self, settings: HealthSettings = HealthSettings()) -> None:
        self.settings = settings
        self._records: dict[str, _Record] = {}
        self._silent = set[str]()  # at the last check

    def state(self, replica: Replica) -> HealthState:
        """State of a replica at the last check."""
        record = self._records.get(replica.name)
        return HealthState.HEALTHY if record is None else record.state

    def available(self, replicas: Iterable[Replica]) -> list[Replica]:
        """The replicas that may get a request: healthy ones, and those on probation that have none. Without any,
        those that report, or else all: a request is better off with one of them than with none."""
        replicas, out = list(replicas), list[Replica]()
        for replica in replicas:
            state = self.state(replica)
            if state is HealthState.HEALTHY or (state is HealthState.PROBATION and not replica.outstanding):
                out.append(replica)
        return out or [r for r in replicas if r.name not in self._silent] or replicas

    def probes(self, replicas: Iterable[Replica]) -> list[Replica]:
        """The replicas among these that are on probation."""
        return [replica for replica in replicas if self.state(replica) is HealthState.PROBATION]

    def forget(self, name: str) -> None:
        """A replica is gone."""
        self._records.pop(name, None)

    def check(self, replicas: Sequence[Replica], now: float) -> bool:
        """Update the states of all replicas. Returns whether any has changed. O(n log n)."""
        changed = False
        silent = {r.name for r in replicas if r.report is not None and r.age(now) > self.settings.silent_after}
        if len(silent) == len(replicas):  # then it is the reports that fail, more likely than all replicas
            silent = set[str]()
        self._silent = silent
        slow = self._slow([r for r in replicas if r.name not in silent], now)
        room = max(1, int(self.settings.most_out * len(replicas))) - sum(
            self.state(r) is not HealthState.HEALTHY for r in replicas if r.name not in silent
        )
        for replica in replicas:
            record = self._records.setdefault(replica.name, _Record())
            state = self._next(replica, record, replica.name in silent, replica.name in slow, now)
            if record.state is HealthState.HEALTHY and state is HealthState.OUT and replica.name not in silent:
                if room <= 0:
                    state = record.state
                room -= 1
            if state is not record.state:
                record.state, record.since, changed = state, now, True
                if state is HealthState.PROBATION:
                    replica.forget_ttft()
        return changed

    def _next(self, replica: Replica, record: _Record, silent: bool, slow: bool, now: float) -> HealthState:
        match record.state:
            case HealthState.HEALTHY:
                return HealthState.OUT if silent or slow else HealthState.HEALTHY
            case HealthState.OUT:
                # A silent replica that reports again waits as well: it may have been restarted, with an empty cache.
                done = not silent and now - record.since >= self.settings.out_for
                return HealthState.PROBATION if done else HealthState.OUT
            case HealthState.PROBATION:
                if silent or slow:
                    return HealthState.OUT
                enough = replica.answered >= self.settings.probation_requests
                return HealthState.HEALTHY if enough else HealthState.PROBATION

    def _slow(self, replicas: Sequence[Replica], now: float) -> set[str]:
        """Names of the replicas that are slow."""
        settings = self.settings

        def lateness(replica: Replica) -> float | None:
            probation = self.state(replica) is HealthState.PROBATION
            least = settings.probation_requests if probation else settings.least_answers
            late, count = replica.lateness_by(now)
            return late if count >= least else None

        def reported(replica: Replica) -> ReplicaReport | None:
            # Step times are learned from steps: those of a replica that was out are old, until its requests are done.
            return None if self.state(replica) is HealthState.PROBATION else replica.report

        measures: tuple[Callable[[Replica], float | None], ...] = (
            lambda r: report.seconds_per_step if (report := reported(r)) else None,
            lambda r: report.seconds_per_prompt_token if (report := reported(r)) else None,
            lateness,
        )
        slow: set[str] = set()
        for measure in measures:
            found = sorted((value, r.name) for r in replicas if (value := measure(r)) is not None)
            values = [value for value, _ in found]
            if len(found) > 1:
                slow |= {name for i, (v, name) in enumerate(found) if v > settings.slow_factor * _others(values, i)}
        return slow


def _others(values: Sequence[float], i: int) -> float:
    """The median of ascending `values` without the i-th."""
    middle = (len(values) - 1) // 2
    at = [k if k < i else k + 1 for k in ((middle - 1, middle) if len(values) % 2 else (middle,))]
    return sum(values[k] for k in at) / len(at)
