"""Draft depth: picks depth and width of a drafter by expected tokens per second.

Step and draft times come from the profile and are corrected by observed times; acceptance rates are learned from
verified drafts. Depth 0 is always considered, so speculation stops where it is expected to be slower than none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, isfinite

import numpy as np
import numpy.typing as npt

from jaxspec.sched.plan import Lookahead
from jaxspec.sched.spec.calibration import AcceptanceRecord, Calibration, FadingRate, verified_nodes
from jaxspec.sched.spec.micro_batches import DrafterLoad, best, seconds
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.timing import StepTimes

#: Prior of a level's acceptance rate: high enough that drafting is tried.
_LEVEL_RATE = 0.6
#: Prior of a wider beam: the share of the narrower one's failures that it prevents, and the observations this counts
#: for. Where step times hardly grow with size, a wider beam is nearly free; a few unlucky rounds must not rule it out.
_WIDER_GAIN, _WIDER_PRIOR = 0.25, 20.0
#: Uncached tokens per request that a drafter usually has at the start of a round.
USUAL_UNCACHED = 2
#: Rounds over which the one-time cost of computing a prompt's KV is spread.
_PREFILL_ROUNDS = 8
#: A level's acceptance rate with a good drafter: no probe where not even that would pay.
_GOOD_RATE = 0.7
#: Share of the time that probes take, at most and, while drafts do not pay, at least.
_PROBE_SHARE, _MIN_PROBE_SHARE = 0.005, 0.0005
#: Levels of a probe.
_PROBE_LEVELS = 2
#: Steps for which a decision not to draft, or of a free drafter, is kept.
_KEEP = 8
#: Rounds without a verified node after which drafting stops, and after which a free drafter probes.
_UNUSED, _FREE_PROBE = 3, 64
#: Least relative gain in expected tokens per second for which drafting is worth the risk.
_MARGIN = 0.03
#: A free drafter's nodes must be likelier than would just pay, by this share of what is left to certainty. Measured
#: with a fixed surplus on chat and code, one request at a time: with 0.2 drafts lose 7 % and gain 8 %, with 0.35 they
#: lose 2 and gain 7 %, with 0.5 they gain 0 and 5 %.
_FREE_MARGIN = 0.4
#: A free drafter's nodes are hardly ever surer than this. Where nodes pay only above a half, siblings never do.
_SUREST, _LESS_THAN_HALF = 0.95, 0.5
#: Weight of the newest observation in the mean number of verified nodes.
_NODES_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Seconds of a step of the target model and of a draft round."""

    step: StepTimes
    #: (requests, uncached tokens, levels, width) -> seconds
    round: Callable[[int, int, int, int], float]
    #: Whether the drafter has its own device, so that micro-batches overlap.
    own_device: bool = False


class DepthController:
    """Picks depth and width of one drafter by expected tokens per second.

    `max_lookahead` bounds depth and draft nodes, `widths` are those that the drafter offers, ascending. `levels` and
    `width` hold the current decision (0 levels: no drafting); `probing` is true while a step drafts only to observe
    the acceptance rate again, for one request.
    """

    def __init__(self, times: DraftTimes, max_lookahead: Lookahead, widths: Sequence[int]) -> None:
        self.times, self.max_lookahead, self.widths = times, max_lookahead, list(widths)
        self.calibration = Calibration()
        #: P(a node of level j is accepted | one of level j - 1 was), by width and level.
        self._level_rates = {w: [FadingRate(_LEVEL_RATE) for _ in range(max_lookahead.levels)] for w in widths}
        #: Recent mean of verified draft nodes per request, by width.
        self._mean_nodes = {w: float(max_lookahead.levels) for w in widths}
        #: Seconds of steps without drafts since the last probe, and the share of them that the next may take.
        self._idle_seconds, self._probe_share = 0.0, _PROBE_SHARE
        #: Steps for which a decision is kept, as long as the number of requests is this, and the seconds of a step
        #: without drafts.
        self._kept_steps: int = 0
        self._kept_requests: int = 0
        self._off_seconds = 0.0
        self.levels = self.width = 0
        self.probing = False
        #: Ids of the requests that are drafted for; None: all.
        self.only: set[str] | None = None
        self._unused = 0  # rounds in a row of which no node was verified
        #: Of a free drafter: nodes that are less likely than this do not pay.
        self.least = 0.0
        #: Committed positions per decoding request, on average; set for each step.
        self.context = 0.0
        #: Seconds of the host that drafts add to a step, rounds not included; set for each step.
        self.overhead = 0.0
        self._last_round: float | None = None
        #: With its own device: micro-batches with which a step is estimated, at least two.
        self._micro_batches = 2

    def keeps_off(self, requests: int) -> bool:
        """Whether the last decision, not to draft for this many requests, still holds. Counts the step."""
        if not self._kept_steps or requests != self._kept_requests:
            return False
        self._kept_steps -= 1
        self._idle_seconds += self._off_seconds
        self.levels = 0
        return True

    def decide(self, requests: int, uncached: int, records: Sequence[AcceptanceRecord], others: int = 0) -> Lookahead:
        """Pick the depth for `requests` decoding requests with `uncached` uncached tokens in total.

        `others` more requests decode in the same step without this drafter. See `keeps_off` first.
        """
        uncached = _spread_uncached(requests, uncached)
        factor = _mean_factor(records)
        self.probing, self.only = False, None
        self.levels, self.width = self._best(requests, uncached, factor, others)
        if self.levels and self._unused < _UNUSED:
            self._probe_share = _PROBE_SHARE
            if self.times.own_device:
                load = self._load(requests, uncached, self.levels, self.width)
                self._micro_batches = max(2, best([load], others, self.times.step.of, others * self.context))
        else:
            plain, levels = self._plain_seconds(requests + others), min(_PROBE_LEVELS, self.max_lookahead.levels)
            probe = self._seconds(1, uncached // requests, levels, self.widths[0], requests - 1 + others) - plain
            self._idle_seconds += plain
            if (
                self._idle_seconds * self._probe_share < probe
                or not self._best(requests, uncached, factor, others, _GOOD_RATE)[0]
            ):
                self.levels = 0
                # The decision hardly changes from step to step: keep it for some steps to save this computation.
                self._kept_steps, self._kept_requests, self._off_seconds = _KEEP, requests, plain
                return Lookahead()
            self.probing, self.levels, self.width = True, levels, self.widths[0]
            self._idle_seconds, self._probe_share = 0.0, max(_MIN_PROBE_SHARE, self._probe_share / 2)
        return self.lookahead

    def drafts_for(self, request_id: str) -> bool:
        """Whether the current decision is to draft for this request, if the drafter serves it."""
        return self.levels > 0 and (self.only is None or request_id in self.only)

    def expected_accepted(self, record: AcceptanceRecord) -> float:
        """Expected number of accepted nodes of a request at the current depth and width."""
        return self._expected_now(record) - 1

    def _expected_now(self, record: AcceptanceRecord) -> float:
        """Expected tokens of a request at the current depth and width, the bonus token included."""
        return next(islice(self._expected(self.width, record.factor), self.levels - 1, None))

    def expected_of(self, candidates: Candidates, record: AcceptanceRecord) -> float:
        """Expected number of accepted nodes of a request whose candidates are all verified."""
        nodes = [i for i, logprob in enumerate(candidates.falling()) if isfinite(logprob)]
        return record.factor * self.calibration.expected_accepted(verified_nodes(candidates, nodes))

    def count_round(self, verified: bool) -> None:
        """A round has ended: the tree policy selected some of its nodes, or none. After a few rounds without any, which
        teach nothing, drafting stops until the next probe."""
        self._unused = 0 if verified else self._unused + 1

    @property
    def lookahead(self) -> Lookahead:
        """The current decision."""
        return Lookahead(min(self.max_lookahead.drafts, self.levels * self.width), self.levels)

    @property
    def usual_nodes(self) -> float:
        """Draft nodes per request usually verified at the current depth and width."""
        return max(self.levels, min(self._mean_nodes.get(self.width, float(self.levels)), self.levels * self.width))

    def usual_round(self, requests: int) -> float:
        """Seconds of a draft round at the current depth and width, with the usual number of uncached tokens."""
        self._last_round = self.times.round(requests, USUAL_UNCACHED * requests, self.levels, self.width)
        return self._last_round

    @property
    def last_round(self) -> float:
        """Seconds that `usual_round` last returned; before its first call, the time of the smallest round."""
        return self._last_round or self.times.round(1, USUAL_UNCACHED, 1, self.widths[0])

    def off(self) -> Lookahead:
        """Do not draft in this step."""
        self.levels, self.probing, self.only = 0, False, None
        return Lookahead()

    def decide_free(self, decoding: Sequence[str]) -> Lookahead:
        """Lookahead of a free drafter: as deep and wide as nodes can pay in a step of these decoding requests (ids)."""
        most, requests = self.max_lookahead, len(decoding)
        if self._kept_steps and requests == self._kept_requests:  # saves time: it hardly changes from step to step
            self._kept_steps -= 1
        else:
            context = requests * self.context
            least = self.times.step.least_chance(requests, context, most.levels, self.overhead)
            self.least = least + _FREE_MARGIN * (1 - least)
            self._kept_steps, self._kept_requests = _KEEP, requests
        if self.least > _SUREST:
            return self.off()
        self.levels, self.probing = most.levels, self._unused >= _FREE_PROBE
        self.only = {decoding[self._unused % requests]} if self.probing else None
        self.width = self.widths[-1] if self.least < _LESS_THAN_HALF else self.widths[0]
        return self.lookahead

    def largest(self, requests: int, verify_budget: int | None) -> Lookahead:
        """The largest depth and width; with a verify budget, what it leaves each request (AdaServe's Eq. 8 and 9)."""
        most = self.max_lookahead
        self.levels, self.width, self.probing, self.only = most.levels, self.widths[-1], False, None
        self.least = 0.0
        if verify_budget is None:
            return most
        if verify_budget <= requests:
            return self.off()
        self.levels = max(1, min(most.levels, ceil(verify_budget / requests)))
        self.width = max((w for w in self.widths if w <= verify_budget // requests), default=self.widths[0])
        return Lookahead(most.drafts, self.levels)

    def decide_for_late(
        self, decoding: int, uncached: int, records: Sequence[AcceptanceRecord], max_nodes: int
    ) -> Lookahead:
        """Pick the depth that gives late requests most tokens per second; `records` are their acceptance records.

        Only those of the `decoding` requests are drafted for, with at most `max_nodes` draft nodes, and only if they
        get more tokens per second than without drafts.
        """
        late, factor = len(records), _mean_factor(records)
        uncached = _spread_uncached(late, uncached)
        plain = self._plain_seconds(decoding)
        best, self.levels, self.width, self.probing = late / plain * (1 + _MARGIN), 0, 0, False
        self.least = 0.0
        for width in self.widths:
            speeds = self._speeds(late, uncached, width, factor, decoding - late)
            for level, speed in enumerate(speeds, 1):
                if speed >= best and (level - 1) * late < max_nodes:
                    best, self.levels, self.width = speed, level, width
        return self.lookahead

    def deepen(
        self, uncached: int, records: Sequence[AcceptanceRecord], needs: Callable[[float], Sequence[float]],
        others: int = 0,
    ) -> Lookahead:  # fmt: skip
        """Draft deeper than `decide` did, for requests that need more tokens for their SLO than its depth gives.

        `records`, `needs`: of the requests drafted for; needs are tokens, by the seconds of the step. The depth of a
        round is common to its requests, so it grows as long as some request is short and gets more tokens per second
        from another level, which is verified for those that are short only.
        """
        requests, start, width = len(records), self.levels, self.width
        uncached = _spread_uncached(requests, uncached)
        took = self._seconds(requests, uncached, start, width, others)
        wanted = {i: need for i, need in enumerate(needs(took)) if need > 1.0}
        expected = {i: list(self._expected(width, records[i].factor)) for i in wanted}
        while (level := self.levels) < self.max_lookahead.levels:
            short = [i for i, need in wanted.items() if need > expected[i][level - 1]]
            extra = (level + 1 - start) * len(short)
            longer = self._seconds(requests, uncached, level + 1, width, others, start, extra)
            if not any(expected[i][level] / longer > expected[i][level - 1] / took for i in short):
                break
            self.levels, took = level + 1, longer
            wanted |= {i: need for i, need in enumerate(needs(took)) if i in wanted}
        return self.lookahead

    def _best(self, requests: int, uncached: int, factor: float, others: int, min_rate: float = 0.0) -> tuple[int, int]:
        """(levels, width) with most expected tokens per second; (0, 0) if nothing beats no drafts by the margin.

        Each level's acceptance rate is the learned one, but at least `min_rate`.
        """
        decoding = requests + others
        best, found = decoding / self._plain_seconds(decoding) * (1 + _MARGIN), (0, 0)
        for width in self.widths:
            speeds = self._speeds(requests, uncached, width, factor, others, others, min_rate)
            for level, speed in enumerate(speeds, 1):
                if speed >= best:
                    best, found = speed, (level, width)
        return found

    def _plain_seconds(self, decoding: int) -> float:
        """Seconds of a step without drafts."""
        return self.times.step.of(decoding, decoding * self.context)

    def _speeds(
        self, requests: int, uncached: int, width: int, factor: float, others: int = 0, counted_others: int = 0,
        min_rate: float = 0.0,
    ) -> Iterator[float]:  # fmt: skip
        """Expected tokens per second with 1, 2, … levels.

        `others` more requests decode in the same step without drafts; the tokens of `counted_others` of them count too.
        """
        for level, expected in enumerate(self._expected(width, factor, min_rate), 1):
            yield (requests * expected + counted_others) / self._seconds(requests, uncached, level, width, others)

    def _expected(self, width: int, factor: float, min_rate: float = 0.0) -> Iterator[float]:
        """Expected tokens of a request, the bonus token included, with 1, 2, … levels."""
        expected = reach = 1.0
        for level in range(1, self.max_lookahead.levels + 1):
            rate = self._level_rate(width, level) * (factor if level == 1 else 1.0)
            reach *= min(1.0, max(min_rate, rate))
            expected += reach
            yield expected

    def _seconds(
        self, requests: int, uncached: int, level: int, width: int, others: int, verified: int | None = None,
        extra: int = 0,
    ) -> float:  # fmt: skip
        """Seconds of a step with its round; all requests verify `verified` levels (None: all that are drafted), and
        some of them `extra` more draft tokens together.

        With a drafter on its own device, the step may be split as `micro_batches.split` does: drafting and verification
        overlap within a step, but a step does not start before the last one ends. Tried are one micro-batch and the
        number that was best for the last depth.
        """
        load, step = self._load(requests, uncached, level, width, verified), self.times.step.of
        if not self.times.own_device:
            tokens = others + extra + round(requests * (1 + load.drafts))
            return self.overhead + load.round(requests) + step(tokens, (requests + others) * self.context)
        counts = {1, min(self._micro_batches, requests)}
        return self.overhead + min(seconds(n, [load], others + extra, step, others * self.context) for n in counts)

    def _load(self, requests: int, uncached: int, level: int, width: int, verified: int | None = None) -> DrafterLoad:
        depth = verified or level
        nodes = max(depth, min(self._mean_nodes[width], depth * width))
        each = uncached / max(requests, 1)
        return DrafterLoad(
            requests, lambda n: self.times.round(n, round(n * each), level, width), nodes, self.times.own_device,
            self.context,
        )  # fmt: skip

    def _level_rate(self, width: int, level: int) -> float:
        """Learned P(some node of the level is accepted | one of the level before was).

        Never below the rate of a narrower beam with more observations, whose nodes the wider beam contains.
        """
        narrowest = self._level_rates[self.widths[0]][level - 1]
        rate, trials = narrowest.value, narrowest.trials
        for wider in self.widths[1:]:
            if wider > width:
                break
            observed, prior = self._level_rates[wider][level - 1], rate + _WIDER_GAIN * (1 - rate)
            wider_rate = (observed.successes + _WIDER_PRIOR * prior) / (observed.trials + _WIDER_PRIOR)
            rate = max(rate, wider_rate) if trials > observed.trials else wider_rate
            trials = max(trials, observed.trials)
        return rate

    def speed(self, requests: int, record: AcceptanceRecord) -> float:
        """Expected tokens per second at the current depth if all `requests` requests were like this one."""
        return requests * self._expected_now(record) / self._seconds(requests, 0, self.levels, self.width, 0)

    def observe(
        self,
        candidates: Candidates,
        chosen: npt.NDArray[np.bool_],
        accepted: Sequence[int],
        record: AcceptanceRecord,
        width: int,
    ) -> None:
        """Learn from one verified tree, of a beam of this width: `chosen` `[n]` was verified, `accepted` is the
        accepted path in order."""
        path, nodes = set(accepted), verified_nodes(candidates, np.flatnonzero(chosen).tolist())
        if not nodes:
            return
        record.observe(self.calibration.expected_accepted(nodes), len(path))
        for node, parent, level, logprob in nodes:
            if parent < 0 or parent in path:
                self.calibration.observe(logprob, node in path, level)
        deepest = max(candidate.level for candidate in nodes)
        if width in self._level_rates:
            rates = self._level_rates[width]
            for level in range(1, min(deepest, len(path) + 1) + 1):
                rates[level - 1].observe(len(path) >= level)
            mean = self._mean_nodes[width]
            self._mean_nodes[width] = mean + _NODES_WEIGHT * (len(nodes) - mean)


def widths_up_to(most: int | None, widths: Sequence[int]) -> Sequence[int]:
    """The widths that are at most `most` (None: all), or else the narrowest; `widths` ascend."""
    return [w for w in widths if most is None or w <= most] or widths[:1]


def _spread_uncached(requests: int, uncached: int) -> int:
    """Uncached tokens to plan a round with: the usual number, plus a share of any more, which occurs once."""
    return min(uncached, USUAL_UNCACHED * requests + uncached // _PREFILL_ROUNDS)


def _mean_factor(records: Sequence[AcceptanceRecord]) -> float:
    return sum(r.factor for r in records) / max(len(records), 1)
