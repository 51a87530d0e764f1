"""Forecasts: what is expected of a request at a replica."""

from __future__ import annotations

from typing import NamedTuple

from jaxspec.sched.admission import MARGIN
from jaxspec.sched.routing.replica import Replica, expected
from jaxspec.sched.routing.request import RoutedRequest


class Forecast(NamedTuple):
    """Seconds from now until a request's first token and until its end, if it is sent to a replica."""

    first: float
    end: float
    #: Whether its SLO, and the TPOT SLOs of the requests that are there, are expected to be met.
    met: bool


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
    queue = before / requests * output / report.slots * seconds if before and requests else 0.0
    own = request.prompt_len - replica.cached_tokens(request)
    first = queue + (prompt + own) * report.seconds_per_prompt_token + seconds
    return Forecast(first, first + (expected(request) - 1) * seconds, _meets(request, replica, first, seconds))


def _meets(request: RoutedRequest, replica: Replica, first: float, seconds: float) -> bool:
    """The admission answer: as `SloAdmission`, without throttling. `seconds`: per token, with the request."""
    slo, report = request.slo, replica.report
    if slo.ttft is not None and first > MARGIN * slo.ttft:
        return False
    tightest = None if report is None else report.tightest_tpot
    if slo.tpot is not None and seconds > MARGIN * slo.tpot:
        return False
    return tightest is None or seconds <= MARGIN * tightest
