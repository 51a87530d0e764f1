"""When and how far to draft: expected tokens per second from measured times and observed acceptance.

The times of a step and of a drafting round come from the engine's profile and are kept up to date; the chance that a
drafted node is accepted is learned from what became of earlier ones. Not to draft is one of the choices, so that
speculation is never knowingly slower than none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.plan import Lookahead
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.timing import StepTimes

#: Bounds of the drafter's probabilities of a node given its parent, by which acceptance is counted.
_EDGES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_LOG_EDGES = np.log(_EDGES)
#: What a beam left empty has a log-probability of minus infinity; this is close enough.
_EMPTY = -1e3
#: Observations that a guess made in advance is worth, and after how many an observation weighs 1/e.
_PRIOR, _MEMORY = 4.0, 1000.0
#: The same of a level's correction, in accepted nodes.
_LEVEL_PRIOR = 20.0
#: The chance of a level before anything is known: enough to try. And the share of a narrower beam's failures that a
#: wider one is hoped to prevent, and how many observations that hope is worth: on a plateau the wider one costs next to
#: nothing, and a few unlucky rounds must not be all that is ever seen of it.
_HOPE, _WIDER, _WIDER_PRIOR = 0.6, 0.25, 20.0
#: Tokens that a drafter catches up with from one round to the next, as a rule.
USUAL_CATCH_UP = 2
#: Rounds over which catching up with a prompt is reckoned: it is done once.
_SPREAD = 8
#: What a level's chance would be with a good drafter.
_GOOD = 0.7
#: Steps without drafts before the first look whether they have become better.
_PATIENCE = 16
#: Steps for which a decision not to draft stands.
_REST = 8
#: A gain below this share is not worth the risk.
_MARGIN = 0.03


@dataclass(slots=True)
class FadingRate:
    """How often something came true, older observations fading; `guess` counts as a few of them."""

    guess: float
    tried: float = 0.0
    held: float = 0.0

    @property
    def value(self) -> float:
        return (self.held + _PRIOR * self.guess) / (self.tried + _PRIOR)

    def observe(self, true: bool) -> None:
        keep = 1 - 1 / _MEMORY
        self.tried, self.held = self.tried * keep + 1, self.held * keep + true


class Calibration:
    """P(accepted | parent accepted) of a node by what the drafter said and by its level: small drafters are too sure of
    themselves, and the more so the more of their own tokens they go on from.

    The shares of accepted nodes by what was said are corrected for each level by how much oftener or seldomer its nodes
    were accepted than those shares would have it.
    """

    def __init__(self) -> None:
        middles = [0.01, *((a + b) / 2 for a, b in zip(_EDGES, [*_EDGES[1:], 1.0], strict=True))]
        self._shares = [FadingRate(m) for m in middles]
        self._levels: list[AcceptanceRecord] = []

    def rates(self) -> np.ndarray:
        """`[bins]` between the bounds."""
        return np.asarray([s.value for s in self._shares])

    def rate(self, slot: int, level: int) -> float:
        """The rate between two bounds, at a level."""
        return self._shares[slot].value * self.of_level(level)

    def of_level(self, level: int) -> float:
        """What the rates of level 1, 2, … are to be multiplied by."""
        return self._levels[level - 1].factor if 0 < level <= len(self._levels) else 1.0

    def observe(self, logprob: float, accepted: bool, level: int) -> None:
        share = self._shares[int(np.searchsorted(_LOG_EDGES, logprob))]
        self._levels += [AcceptanceRecord(_LEVEL_PRIOR, _LEVEL_PRIOR) for _ in range(level - len(self._levels))]
        keep = 1 - 1 / _MEMORY
        at = self._levels[level - 1]
        at.expected = keep * at.expected + (1 - keep) * _LEVEL_PRIOR + share.value
        at.accepted = keep * at.accepted + (1 - keep) * _LEVEL_PRIOR + accepted
        share.observe(accepted)


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Seconds of a step, and of a drafting round by what it holds."""

    step: StepTimes
    #: (requests, tokens to catch up with, levels, width) -> seconds
    round: Callable[[int, int, int, int], float]


@dataclass(slots=True)
class AcceptanceRecord:
    """What is known of one request: draft nodes' expected and actual acceptance, both fading."""

    expected: float = _PRIOR
    accepted: float = _PRIOR

    @property
    def factor(self) -> float:
        """How much better than others' its drafts do."""
        return self.accepted / self.expected

    def observe(self, expected: float, accepted: int) -> None:
        self.expected = 0.97 * self.expected + 0.03 * _PRIOR + expected
        self.accepted = 0.97 * self.accepted + 0.03 * _PRIOR + accepted


class DepthController:
    """Decides for one drafter. `most` bounds what is considered; levels and widths are what the drafter offers."""

    def __init__(self, times: DraftTimes, most: Lookahead, widths: Sequence[int]) -> None:
        self.times, self.most, self.widths = times, most, list(widths)
        self.calibration = Calibration()
        #: P(some node of level j is accepted | level j - 1 was), by width and level.
        self._reach = {w: [FadingRate(_HOPE) for _ in range(most.levels)] for w in widths}
        #: Draft nodes a request that were worth verifying, of late.
        self._nodes = {w: float(most.levels) for w in widths}
        #: Steps without drafts since the last look, and after how many the next one is due.
        self._idle, self._patience = 0, _PATIENCE
        self._rest = self._resting_with = 0
        self.levels = self.width = 0
        self.probing = False
        self._last_round: float | None = None

    def decide(self, requests: int, catch_up: int, records: Sequence[AcceptanceRecord], others: int = 0) -> Lookahead:
        """How far to draft for so many decoding requests, with `catch_up` tokens that the drafter has not seen, beside
        `others` that decode without it."""
        if self._rest and requests == self._resting_with:
            self._rest -= 1
            self._idle += 1
            self.levels = 0
            return Lookahead()
        catch_up = min(catch_up, USUAL_CATCH_UP * requests + catch_up // _SPREAD)
        factor = sum(r.factor for r in records) / max(len(records), 1)
        self.probing = False
        self.levels, self.width = self._best(requests, catch_up, factor, others)
        if self.levels:
            self._patience = max(_PATIENCE, self._patience // 2)
        else:
            self._idle += 1
            # A look now and then whether drafts have become better, ever more seldom if they have not, and never where
            # even good ones would not pay.
            if self._idle < self._patience or not self._best(requests, catch_up, factor, others, _GOOD)[0]:
                # Nothing changes from one step to the next: spare the steps this very reckoning.
                self._rest, self._resting_with = _REST, requests
                return Lookahead()
            self.probing, self.levels, self.width = True, min(2, self.most.levels), self.widths[0]
            self._idle, self._patience = 0, min(2 * self._patience, 512)
        return Lookahead(min(self.most.drafts, self.levels * self.width), self.levels)

    @property
    def usual_nodes(self) -> float:
        """Draft nodes a request that are verified with the levels decided on."""
        return max(self.levels, min(self._nodes.get(self.width, float(self.levels)), self.levels * self.width))

    def usual_round(self, requests: int) -> float:
        """Seconds of drafting for so many with the levels decided on, where the drafter has kept up with them."""
        self._last_round = self.times.round(requests, USUAL_CATCH_UP * requests, self.levels, self.width)
        return self._last_round

    @property
    def last_round(self) -> float:
        """Seconds of the last round that `usual_round` was asked for, whatever the levels are now."""
        return self._last_round or self.times.round(1, USUAL_CATCH_UP, 1, self.widths[0])

    def off(self) -> Lookahead:
        """Nobody is to be drafted for."""
        self.levels, self.probing = 0, False
        return Lookahead()

    def decide_for_late(
        self, needy: int, decoding: int, catch_up: int, records: Sequence[AcceptanceRecord], room: int
    ) -> Lookahead:
        """How far to draft for `needy` of the `decoding` requests, so that those few get their tokens soonest.

        Not at all if drafts make a step longer than they are worth, even to them. At most `room` draft nodes.
        """
        factor = sum(r.factor for r in records) / max(len(records), 1)
        catch_up = min(catch_up, USUAL_CATCH_UP * needy + catch_up // _SPREAD)
        best, self.levels, self.width, self.probing = needy / self.times.step.of(decoding) * (1 + _MARGIN), 0, 0, False
        for width in self.widths:
            speeds = self._speeds(needy, catch_up, width, factor, decoding - needy)
            for level, speed in enumerate(speeds, 1):
                if speed >= best and (level - 1) * needy < room:
                    best, self.levels, self.width = speed, level, width
        return Lookahead(min(self.most.drafts, self.levels * self.width), self.levels)

    def _best(self, requests: int, catch_up: int, factor: float, others: int, at_least: float = 0.0) -> tuple[int, int]:
        """(levels, width) of most tokens per second, were each level reached with a chance of `at_least` or as learned;
        (0, 0) if nothing is faster than no drafts."""
        all_of_them = requests + others
        best, choice = all_of_them / self.times.step.of(all_of_them) * (1 + _MARGIN), (0, 0)
        for width in self.widths:
            speeds = self._speeds(requests, catch_up, width, factor, others, others, at_least)
            for level, speed in enumerate(speeds, 1):
                if speed >= best:
                    best, choice = speed, (level, width)
        return choice

    def _speeds(
        self, requests: int, catch_up: int, width: int, factor: float, others: int = 0, counted: int = 0,
        at_least: float = 0.0,
    ) -> Iterator[float]:  # fmt: skip
        """Expected tokens per second of these requests with 1, 2, … levels; `others` decode beside them, the tokens of
        `counted` of which count too."""
        expected = reach = 1.0
        for level in range(1, self.most.levels + 1):
            chance = self._chance(width, level) * (factor if level == 1 else 1.0)
            reach *= min(1.0, max(at_least, chance))
            expected += reach
            nodes = max(level, min(self._nodes[width], level * width))
            cost = self.times.round(requests, catch_up, level, width)
            cost += self.times.step.of(others + round(requests * (1 + nodes)))
            yield (requests * expected + counted) / cost

    def _chance(self, width: int, level: int) -> float:
        """P(some node of the level is accepted | one of the level before was), as far as it is known.

        A wider beam's is no less than that of a narrower one that has been seen more often: it has its nodes and more.
        """
        chance, seen = self._reach[self.widths[0]][level - 1].value, self._reach[self.widths[0]][level - 1].tried
        for wider in self.widths[1:]:
            if wider > width:
                break
            share, hoped = self._reach[wider][level - 1], chance + _WIDER * (1 - chance)
            own = (share.held + _WIDER_PRIOR * hoped) / (share.tried + _WIDER_PRIOR)
            chance = max(chance, own) if seen > share.tried else own
            seen = max(seen, share.tried)
        return chance

    def speed(self, requests: int, record: AcceptanceRecord) -> float:
        """Expected tokens per second with the levels decided on, if all of so many requests were like this one."""
        return list(self._speeds(requests, 0, self.width, record.factor))[self.levels - 1]

    def observe(
        self, candidates: Candidates, chosen: np.ndarray, accepted: Sequence[int], record: AcceptanceRecord
    ) -> None:
        """What became of one request's drafts: `accepted` are the candidates on the accepted path, in order."""
        if not chosen.any():
            return
        path = set(accepted)
        nodes = np.flatnonzero(chosen)
        tried, above = nodes.tolist(), candidates.parent[nodes].tolist()
        depth = {-1: 0}
        for i, parent in zip(tried, above, strict=True):
            depth[i] = depth[parent] + 1
        record.observe(self._expected(candidates, nodes, above, depth, record), len(path))
        said = {-1: 0.0} | dict(zip(tried, candidates.logprob[nodes].tolist(), strict=True))
        for i, parent in zip(tried, above, strict=True):
            if parent < 0 or parent in path:
                self.calibration.observe(said[i] - said[parent], i in path, depth[i])
        deepest = max(depth.values())
        if self.width in self._reach:
            reach = self._reach[self.width]
            for level in range(1, min(deepest, len(path) + 1) + 1):
                reach[level - 1].observe(len(path) >= level)
            usual = self._nodes[self.width]
            self._nodes[self.width] = usual + 0.05 * (len(tried) - usual)

    def _expected(
        self,
        candidates: Candidates,
        nodes: np.ndarray,
        above: Sequence[int],
        depth: Mapping[int, int],
        record: AcceptanceRecord,
    ) -> float:
        """How many of these nodes, parents among them, are expected to be accepted: the sum of their `chances`."""
        path = np.maximum(candidates.logprob, _EMPTY)
        own = path[nodes] - np.where(candidates.parent[nodes] < 0, 0, path[above])
        chance = {-1: min(1.0, record.factor)}
        for i, parent, slot in zip(nodes.tolist(), above, np.searchsorted(_LOG_EDGES, own).tolist(), strict=True):
            chance[i] = chance[parent] * min(1.0, self.calibration.rate(slot, depth[i]))
        del chance[-1]
        return float(np.asarray(list(chance.values())).sum())


def chances(forest: Forest, controllers: Sequence[DepthController], records: Sequence[AcceptanceRecord]) -> np.ndarray:
    """P(accepted) of each candidate `[N]`: calibrated from node to node along its path; 0 for empty places.

    Each tree was drafted by a drafter, `controllers`, for a request, `records`.
    """
    kinds = {id(s): s.calibration for s in controllers}
    place = {key: i for i, key in enumerate(kinds)}
    rates = np.stack([c.rates() for c in kinds.values()])
    levels = np.asarray([[c.of_level(level) for level in range(forest.height + 1)] for c in kinds.values()])
    kind = np.asarray([place[id(s)] for s in controllers])[forest.tree]
    path = np.maximum(forest.logprob, _EMPTY)
    own = path - np.append(path, path.dtype.type(0))[forest.parent]
    chance = np.minimum(1.0, rates[kind, np.searchsorted(_LOG_EDGES, own)] * levels[kind, forest.depth])
    chance[path <= _EMPTY] = 0.0
    factor = np.asarray([min(1.0, record.factor) for record in records])[forest.tree]
    return forest.down(np.where(forest.depth == 1, factor * chance, chance), 1.0, np.multiply)


def choose_nodes(
    times: StepTimes, forest: Forest, chances: np.ndarray, limits: Sequence[int], others: int, probing: Sequence[bool]
) -> list[np.ndarray]:
    """The nodes that raise expected tokens per second most, over all requests: masks `[n]` bool, closed under parents.

    `chances [N]` are the candidates' (`chances`), `others` counts the step's tokens that are no drafts. A
    request that is `probing` gets a node in any case: to learn something is worth a step.
    """
    # Chances fall along a path, and a stable sort keeps parents before their children where they don't.
    ranked = forest.ranked(chances, 0.0)
    most = np.minimum(ranked.count, limits)
    best = forest.best(ranked, most)
    taken = np.bincount(forest.tree[best[: times.worth(ranked.value[best], others, others)]], minlength=len(forest))
    return forest.take(ranked, np.maximum(taken, np.minimum(most, probing)))
