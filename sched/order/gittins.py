"""Gittins index: the request with the best chance to end soon for the work that it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeFloat, PositiveInt

from jaxspec.sched.length.distribution import LengthDistribution, RatioDistribution
from jaxspec.sched.order.order import Order
from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request, RequestStatus
from jaxspec.sched.slots import ORDERS, Need, Section, SlotContext

_Floats = npt.NDArray[np.float64]

#: Steps that the mean speed of all requests counts for in a request's own, and weight of a step in that mean.
_PRIOR_STEPS, _WEIGHT = 8.0, 1e-3
#: Time of a prompt token relative to that of a decode step, where it was not measured.
_PROMPT_TOKEN = 0.03
#: From this share of all requests on, the next length on the grid is one that many have: a request comes nearer to it.
#: Else it stands for those around it, and the rank in between is interpolated.
_ATOM = 0.1


class GittinsSettings(Section):
    """`order: gittins`: smallest expected work per chance to end (Gittins index)."""

    #: Output tokens for which a request keeps its rank, so that requests do not alternate at every step; a later
    #: prediction changes it at once.
    quantum: PositiveInt = 16
    #: A running request counts as this share better than it is: preempting costs time, and ranks are estimates.
    reluctance: float = Field(default=0.8, ge=0, lt=1)
    #: Time of a prompt token relative to that of a decode step. None: as measured.
    prompt_token: NonNegativeFloat | None = None


@dataclass(slots=True)
class _Table:
    """A `RatioDistribution` as the index needs it, for ages on a grid of ratios.

    `ages [n + 1]`: 0 and each ratio at which requests end, ascending. Row i is for a request of at least `ages[i]`: the
    chance `[n]` to end by each later ratio, and the expected work `[n]` until then or its end, in units of its
    prediction. `mass [n]`: the share of all requests that end after `ages[i]` and by the next one.
    """

    ages: _Floats
    mass: _Floats
    chance: _Floats
    work: _Floats
    version: int

    @classmethod
    def of(cls, distribution: RatioDistribution, most: int = 64) -> _Table:
        version, (all_ratios, all_survival) = distribution.version, distribution.curve
        ratios, first = np.unique(all_ratios[::-1], return_index=True)  # of equal ratios the last survival counts
        survival = all_survival[::-1][first]
        if len(ratios) > most:  # cells of about equal mass
            kept = np.unique(np.searchsorted(1 - survival, np.arange(1, most + 1) / most - 1e-9))
            ratios, survival = ratios[kept], survival[kept]
        ages, above = np.append(0.0, ratios), np.append(1.0, survival)
        # Mean of min(ratio, x) for each x of the grid: survival summed over it.
        area = np.append(0.0, np.cumsum(above[:-1] * np.diff(ages)))
        left = np.maximum(above[:, None], 1e-9)
        chance = np.maximum(above[:, None] - above[None, 1:], 0.0) / left
        work = np.maximum(area[None, 1:] - area[:, None], 0.0) / left
        return cls(ages, above[:-1] - above[1:], chance, work, version)

    def rank(self, age: float, unit: float, setup: float) -> float:
        """Smallest (setup + expected work) / chance to end, over all times at which to stop, in decode steps.

        `age`: output since the prediction / `unit`, the tokens that a ratio of 1 stands for. Beyond all ratios: as much
        again.
        """
        i = int(np.searchsorted(self.ages, age, "right")) - 1
        if i == len(self.ages) - 1:
            return setup + max(age, 1.0) * unit
        gone = age - self.ages[i]
        if self.mass[i] > _ATOM:
            return self._rank(i, unit, setup, gone)
        share = gone / (self.ages[i + 1] - self.ages[i])
        here = self._rank(i, unit, setup)
        return here if not share else (1 - share) * here + share * self.rank(float(self.ages[i + 1]), unit, setup)

    def _rank(self, i: int, unit: float, setup: float, gone: float = 0.0) -> float:
        """At `gone` after `ages[i]`, if no request ends in between."""
        usable = self.chance[i] > 0
        return float(((setup + unit * (self.work[i][usable] - gone)) / self.chance[i][usable]).min())


@dataclass(slots=True)
class _Speed:
    """Steps and tokens of a request's decoding."""

    steps: float = 0.0
    tokens: float = 0.0


@ORDERS.register("gittins", GittinsSettings)
class Gittins(Order):
    """Smallest Gittins rank first: over all stopping times, the least expected work per probability to end.

    The work is in decode steps: what is left of the prompt (after a preemption, of all tokens), and the remaining
    output divided by the tokens that the request gets per step (its accepted drafts, drawn to the mean of all
    requests while they are few). The output length is distributed as in ended requests, relative to the prediction;
    once a length probe has predicted again, what is left is distributed as after such predictions (Aalto, Ayesta and
    Righter 2009; Scully and Harchol-Balter 2018).

    With exact predictions this is SRPT; without any, where the hazard rate falls, least attained service, and where it
    grows, first come, first served.
    """

    preemptive = True
    rule = "requests that are likely to end soon go first"
    needs = frozenset({Need.LENGTHS, Need.RUNTIME})

    def __init__(self, settings: GittinsSettings, lengths: LengthDistribution, prompt_token: float) -> None:
        self._quantum, self._reluctance = settings.quantum, settings.reluctance
        self._lengths, self._prompt_token = lengths, prompt_token
        self._tables: dict[RatioDistribution, _Table] = {}
        self._speeds = PerRequest[_Speed](lambda _: _Speed())
        #: Mean tokens per decoding step of all requests.
        self._mean_speed = 1.0
        # What a request's rank was computed from, and the rank: it stays while the request waits.
        self._ranks = PerRequest[tuple[Any, float]](lambda _: (None, 0.0))
        self._waiting: WeakSet[Request] = WeakSet()  # and some that have run since

    @classmethod
    def build(cls, settings: GittinsSettings, context: SlotContext) -> Gittins:
        assert context.lengths is not None
        prompt_token = settings.prompt_token
        if prompt_token is None:
            costs = context.costs
            prompt_token = costs.prefill_token / costs.decode_step if costs and costs.decode_step else _PROMPT_TOKEN
        return cls(settings, context.lengths, prompt_token)

    def key(self, request: Request) -> Any:
        distribution, unit, start = self._lengths.of(request)
        table, running = self._table(distribution), request.status is RequestStatus.RUNNING
        if not running:
            self._waiting.add(request)
        output = max(request.output_len // self._quantum * self._quantum - start, 0)
        state = distribution, table.version, start, unit, output, request.remaining_known
        known, rank = self._ranks.of(request)
        if known != state:
            setup = self._prompt_token * (request.remaining_known - 1)
            rank = table.rank(output / unit, unit / self._speed(request), setup)
            self._ranks.set(request, (state, rank))
        return rank * (1 - self._reluctance) if running else rank

    def observe(self, request: Request, result: RequestResult, seconds: float) -> None:
        speed = self._speeds.of(request)
        speed.steps += 1
        speed.tokens += len(result.tokens)
        self._mean_speed += _WEIGHT * (len(result.tokens) - self._mean_speed)

    def rekeyed(self) -> Iterable[Request]:
        """All requests that wait, when the distribution has changed."""
        if all(table.version == distribution.version for distribution, table in self._tables.items()):
            return ()
        self._tables.clear()
        waiting = [r for r in self._waiting if not r.ended and r.status is not RequestStatus.RUNNING]
        self._waiting = WeakSet(waiting)
        return waiting

    def _table(self, distribution: RatioDistribution) -> _Table:
        """The table of the distribution as it was at the last `rekeyed`: what waits keeps its key until then."""
        table = self._tables.get(distribution)
        if table is None:
            table = self._tables[distribution] = _Table.of(distribution)
        return table

    def _speed(self, request: Request) -> float:
        """Tokens per decoding step."""
        own = self._speeds.of(request)
        return (own.tokens + _PRIOR_STEPS * self._mean_speed) / (own.steps + _PRIOR_STEPS)
