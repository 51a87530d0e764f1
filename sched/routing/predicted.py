"""Predicted: the replica where the request is expected to end first, and where its SLO is expected to be met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from pydantic import PositiveFloat, PositiveInt

from jaxspec.sched.admission import MARGIN
from jaxspec.sched.routing.candidates import Candidates
from jaxspec.sched.routing.power_of_two import less_loaded, two
from jaxspec.sched.routing.replica import Replica, expected
from jaxspec.sched.routing.request import RoutedRequest
from jaxspec.sched.routing.routing import ROUTINGS, Routing, some
from jaxspec.sched.slots import Need, Section


class PredictedSettings(Section):
    """`routing: predicted`: which replicas it looks at, and how long it trusts a report."""

    #: Up to this many replicas it looks at all, of more at a few.
    all_up_to: PositiveInt = 16
    #: Seconds after which a report no longer counts.
    stale_after: PositiveFloat = 2.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of a request at a replica: seconds until its first token and until its end."""

    first: float
    end: float
    #: Whether its SLO, and the TPOT SLOs of the requests that are there, are expected to be met.
    met: bool


@ROUTINGS.register("predicted", PredictedSettings)
class Predicted(Routing):
    """Smallest predicted completion time, among the replicas that would meet the SLO if there are any.

    The forecast knows the replica's speed, how much work its requests are still predicted to be, and which part of the
    prompt is cached there. The older a report, the less it counts: its forecast moves towards the candidates' mean. If
    none counts, or the request's length is not predicted, it is power of two choices.
    """

    needs = frozenset({Need.LENGTHS, Need.STEP_TIMES})

    def __init__(self, settings: PredictedSettings, random: Random) -> None:
        super().__init__(settings, random)
        self._limits = settings
        self._candidates = Candidates(random, settings.all_up_to)

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica], now: float) -> Replica:
        replica = self._best(request, some(replicas), now)
        self._candidates.chose(request, replica)
        return replica

    def _best(self, request: RoutedRequest, replicas: Sequence[Replica], now: float) -> Replica:
        if request.expected_tokens is None:
            return less_loaded(two(replicas, self.random))
        candidates = self._candidates.among(request, replicas, now)
        stale_after = self._limits.stale_after
        found = [(forecast(request, r, now), r) for r in candidates if r.age(now) < stale_after]
        if not found:
            return less_loaded(two(replicas, self.random))
        mean = sum(one.end for one, _ in found) / len(found)

        def rank(one: tuple[Forecast, Replica]) -> tuple[bool, float, float]:
            expectation, replica = one
            doubt = max(0.0, replica.age(now)) / stale_after
            # Of equal ones a random one: else idle replicas would be used in their order.
            return not expectation.met, expectation.end + doubt * (mean - expectation.end), self.random.random()

        return min(found, key=rank)[1]


def forecast(request: RoutedRequest, replica: Replica, now: float) -> Forecast:
    """What is expected of a request if it is sent to a replica now. Raises `ValueError` if that has not reported."""
    report = replica.report
    if report is None:
        raise ValueError(f"{replica.name} has not reported")
    prompt, output = replica.work(now)
    requests = replica.requests
    seconds = report.token_seconds(requests + 1)
    # With all slots taken, as many requests must end as wait, and one more: their share of the output tokens, which all
    # slots together generate.
    before = max(0, requests + 1 - report.slots)
    queue = before / requests * output / report.slots * seconds if before else 0.0
    own = request.prompt_len - replica.cached_tokens(request)
    first = queue + (prompt + own) * report.seconds_per_prompt_token + seconds
    end = first + (expected(request) - 1) * seconds
    return Forecast(first, end, _meets(request, replica, first, seconds))


def _meets(request: RoutedRequest, replica: Replica, first: float, seconds: float) -> bool:
    """The admission answer: as `SloAdmission`, without throttling. `seconds`: per token, with the request."""
    slo, report = request.slo, replica.report
    if slo.ttft is not None and first > MARGIN * slo.ttft:
        return False
    tpots = [tpot for tpot in (slo.tpot, report.tightest_tpot if report else None) if tpot is not None]
    return not tpots or seconds <= MARGIN * min(tpots)
