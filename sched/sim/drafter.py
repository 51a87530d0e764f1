"""Simulated drafter: candidate trees, and which of their nodes are correct, from a random process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.sim.draft_cost import DraftCost
from jaxspec.sched.spec.drafter import Proposal, SamplingOf, SharedDevice
from jaxspec.sched.spec.micro_batches import committed_positions
from jaxspec.sched.spec.trees.candidates import Candidates, Draft
from jaxspec.sched.timing import DraftRoundTimes

#: Positions off the true text, per request, that wrong tokens lead to.
_OFF_TEXT = 64


class Rates(Protocol):
    """Draws the acceptance rate of each of `count` requests, as `jaxspec.sched.sim.acceptance.Process` does."""

    def rates(self, count: int, rng: np.random.Generator) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class TreeProcess:
    """Random process of a drafter's accuracy and calibration.

    A request has a rate p, drawn from `rates`. At each position of its text the drafter's first child is correct with
    probability c ~ Beta(p · `evenness`, (1 - p) · `evenness`), so some positions are easy and others hard. The k-th
    child is correct with probability `others` · c (1 - c)^(k-1). The probabilities that the drafter states are computed
    in the same way from sigmoid((logit(c) + `noise` · z) / `temperature`) instead of c, with a standard normal z; a
    temperature below 1 makes it overconfident. Raises `ValueError` naming the parameter that is out of range.
    """

    rates: Rates
    evenness: float = 2.0
    others: float = 0.8
    temperature: float = 0.7
    noise: float = 0.7
    #: Most children of a node that the drafter may propose.
    choices: int = 4

    def __post_init__(self) -> None:
        if min(self.evenness, self.temperature) <= 0 or self.noise < 0 or self.choices < 1:
            raise ValueError("evenness, temperature and choices must be positive and noise not negative")
        if not 0 <= self.others <= 1:
            raise ValueError(f"others must be between 0 and 1, got {self.others}")

    def chances(self, first: np.ndarray) -> np.ndarray:
        """Probabilities of the children at each position `[positions, choices]`, descending, from those of the first
        children `[positions]`."""
        others = self.others * first[:, None] * (1 - first[:, None]) ** np.arange(1, self.choices)
        return np.concatenate([first[:, None], others], axis=1)

    def draw(self, rates: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """True and stated probabilities of the children at one position per rate; both `[positions, choices]`."""
        first = np.clip(rng.beta(rates * self.evenness, (1 - rates) * self.evenness), 0.005, 0.995)
        logit = np.log(first / (1 - first)) + self.noise * rng.standard_normal(first.shape)
        return self.chances(first), self.chances(1 / (1 + np.exp(-logit / self.temperature)))


class SimulatedDrafter(SharedDevice):
    """Proposes trees like the engine's draft models: beams, which have per level the `width` nodes with the highest
    stated probability, or with `expansion` each node's `expansion[level]` likeliest children, whatever the `width`.

    The true text is drawn in advance, for every position of the requests, which have `outputs` output tokens: which
    child, if any, is the next token. So all policies see the same truth, whatever is drafted and when. Token ids of
    candidates are their ranks among their siblings. Raises `ValueError` if a width, also one of `expansion`, exceeds
    the process's `choices`.
    """

    def __init__(
        self, process: TreeProcess, outputs: Sequence[int], cost: DraftCost, rng: np.random.Generator,
        widths: Sequence[int] = (1, 2, 4), name: str = "simulated", own_device: bool = False,
        expansion: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`widths`: beam widths. With an `expansion` they are not used: the width is that of its last level."""
        if (most := max(expansion or widths)) > process.choices:
            what = "expansion: width" if expansion else "width"
            raise ValueError(f"{what} {most} exceeds the process's choices, {process.choices}")
        self._expansion = expansion
        widths = (prod(expansion),) if expansion else widths
        self.widths, self.cost, self.name, self.own_device = tuple(widths), cost, name, own_device
        #: Seconds spent on drafting since a caller last reset it to 0.
        self.spent = 0.0
        #: As on the engine, estimates know nothing of contexts, but are corrected by the rounds.
        self._times = DraftRoundTimes(cost.seconds)
        lengths = np.asarray(outputs, int) + _OFF_TEXT
        self.rates = process.rates.rates(len(lengths), rng)
        self._first = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        chances, stated = process.draw(np.repeat(self.rates, lengths), rng)
        self._stated = np.log(stated).astype(np.float32)
        #: The position that each child at a position leads to, and whether it is the true next token; both
        #: `[positions, choices]`.
        self._next, self._correct = self._transitions(np.asarray(outputs, int), lengths, chances, rng)
        self._cached = PerRequest(lambda _: 0)
        self._correct_nodes = PerRequest(lambda _: np.zeros(0, bool))

    @staticmethod
    def _transitions(
        outputs: np.ndarray, lengths: np.ndarray, chances: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """(next position, whether correct) of each child at each position, both `[positions, choices]`.

        outputs, lengths `[requests]`: output tokens, and those plus `_OFF_TEXT`; chances `[positions, choices]`.
        """
        positions, choices = len(chances), int(chances.shape[1])
        first = np.repeat(np.cumsum(lengths) - lengths, lengths)
        output = np.repeat(outputs, lengths)
        position = np.arange(positions)
        on_text = position - first < output
        # One random number per position against cumulative probabilities selects the correct child, if any.
        correct: np.ndarray = (rng.random(positions)[:, None] < np.cumsum(chances, axis=1)) & on_text[:, None]
        correct[:, 1:] &= ~correct[:, :-1]
        # Wrong children lead to a position off the text that depends only on their parent's position and their rank.
        offset = (position[:, None] * 7919 + np.arange(choices) * 104729) % _OFF_TEXT
        last = position - first + 1 >= output
        next_position = np.where(correct & ~last[:, None], position[:, None] + 1, (first + output)[:, None] + offset)
        return next_position, correct

    def precompute_kv(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> None:
        """Takes no simulated time: the drafter's device is idle meanwhile."""
        for one in scheduled:
            self._cached.set(one.request, len(one.request.tokens))

    def uncached_tokens(self, request: Request) -> int:
        return len(request.tokens) - self._cached.of(request)

    def propose(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int, least: float = 0.0
    ) -> Proposal:
        size = len(scheduled), sum(self.uncached_tokens(w.request) for w in scheduled), levels, width
        seconds = self.cost.seconds(*size, committed_positions(scheduled))
        self.spent += seconds
        self._times.observe(*size, seconds)
        token, parent, logprob, correct = self._grow(
            np.array([self._first[int(w.request.id)] + w.request.output_len for w in scheduled]), levels, width
        )
        candidates: list[Candidates | None] = []
        for i, one in enumerate(scheduled):
            request = one.request
            self._cached.set(request, len(request.tokens))
            self._correct_nodes.set(request, correct[i])
            candidates.append(Candidates(token[i], parent[i], logprob[i]))
        return lambda: candidates

    def _grow(
        self, roots: np.ndarray, levels: int, width: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(token, parent, path log-probability, whether correct) of the nodes by level, each `[requests, nodes]`.

        roots `[requests]`: positions of the requests' last tokens.
        """
        n, choices = len(roots), self._stated.shape[1]
        row = np.arange(n)[:, None]
        position, path = roots[:, None], np.zeros((n, 1), np.float32)
        out: list[tuple[np.ndarray, ...]] = []
        first = -1  # index of the first node of the level above
        for level in range(levels):
            parents = path.shape[1]
            value = (path[:, :, None] + self._stated[position]).reshape(n, -1)
            if self._expansion:  # the children stand in order of their probabilities
                kept = np.arange(parents)[:, None] * choices + np.arange(self._expansion[level])
                best = np.broadcast_to(kept.ravel(), (n, kept.size))
            else:
                best = np.argsort(-value, axis=1, kind="stable")[:, :width]
            above, rank = best // choices, best % choices
            path, origin = value[row, best], position[row, above]
            position = self._next[origin, rank]
            out.append((rank, above + first, path, self._correct[origin, rank]))
            first += parents
        token, parent, logprob, correct = (np.concatenate(column, axis=1) for column in zip(*out, strict=True))
        return token.astype(np.int32), parent.astype(np.int32), logprob, correct

    def accepted(self, request: Request, draft: Draft) -> list[int]:
        """Accepted nodes of the draft, ascending. The draft must be selected from the request's last proposal."""
        # No wrong node leads back to the true text, so the correct nodes form one path.
        return np.flatnonzero(self._correct_nodes.of(request)[draft.source]).tolist()

    def seconds(self, requests: int, uncached: int, levels: int, width: int) -> float:
        return self._times.of(requests, uncached, levels, width)
