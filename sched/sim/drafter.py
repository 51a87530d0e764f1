"""A draft model for the simulator: candidate trees, and which of their nodes are right, from a random process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.sim.draft_cost import DraftCost
from jaxspec.sched.spec.drafter import Proposal, SamplingOf, SharedDevice
from jaxspec.sched.spec.trees.candidates import Candidates, Draft

#: Places beside the true text that each request's wrong guesses lead to.
_ASTRAY = 64


class Rates(Protocol):
    """The rate of each of so many requests, as `jaxspec.sched.sim.acceptance.Process` draws it."""

    def rates(self, count: int, rng: np.random.Generator) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class TreeProcess:
    """How good a drafter is, and how well it knows.

    A request has a rate p, drawn as `rates` says. At each place of its text the drafter's first choice is right with
    the chance c ~ Beta(p · `evenness`, (1 - p) · `evenness`): some places are easy and others hard. Its k-th choice is
    right with the chance `others` · c (1 - c)^(k-1). What the drafter says follows the same law, from a c of its own:
    sigmoid((logit(c) + `noise` · z) / `temperature`) with a standard normal z, so below 1 the temperature makes it too
    sure of itself. Raises `ValueError` naming the parameter that is out of range.
    """

    rates: Rates
    evenness: float = 2.0
    others: float = 0.8
    temperature: float = 0.7
    noise: float = 0.7
    #: Children of a node that the drafter may propose.
    choices: int = 4

    def __post_init__(self) -> None:
        if min(self.evenness, self.temperature) <= 0 or self.noise < 0 or self.choices < 1:
            raise ValueError("evenness, temperature and choices must be positive, and noise not negative")
        if not 0 <= self.others <= 1:
            raise ValueError(f"others must be between 0 and 1, got {self.others}")

    def chances(self, first: np.ndarray) -> np.ndarray:
        """Of the choices at each place `[places, choices]`, falling, by the first one's `[places]`."""
        others = self.others * first[:, None] * (1 - first[:, None]) ** np.arange(1, self.choices)
        return np.concatenate([first[:, None], others], axis=1)

    def draw(self, rates: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Chances of the choices at one place for each rate: as they are, and as the drafter says; both
        `[places, choices]`."""
        first = np.clip(rng.beta(rates * self.evenness, (1 - rates) * self.evenness), 0.005, 0.995)
        logit = np.log(first / (1 - first)) + self.noise * rng.standard_normal(first.shape)
        return self.chances(first), self.chances(1 / (1 + np.exp(-logit / self.temperature)))


class SimulatedDrafter(SharedDevice):
    """Proposes beams as the engine's draft models do: level by level, the likeliest `width` nodes by what it says.

    The true text is fixed beforehand, for each place of each of the requests with `outputs` tokens: which of the
    drafter's choices there is the next token, if any. So whatever is drafted, and when, all policies see the same
    truth. Token ids of candidates are their ranks among their siblings.
    """

    def __init__(
        self, process: TreeProcess, outputs: Sequence[int], cost: DraftCost, rng: np.random.Generator,
        widths: Sequence[int] = (1, 2, 4), name: str = "simulated", own_device: bool = False,
    ) -> None:  # fmt: skip
        if max(widths) > process.choices:
            raise ValueError(f"a beam of {max(widths)} needs as many choices, the process has {process.choices}")
        self.widths, self.cost, self.name, self.own_device = tuple(widths), cost, name, own_device
        #: Seconds of the rounds since somebody set it to zero.
        self.spent = 0.0
        lengths = np.asarray(outputs, int) + _ASTRAY
        self.rates = process.rates.rates(len(lengths), rng)
        self._first = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        chances, said = process.draw(np.repeat(self.rates, lengths), rng)
        self._said = np.log(said).astype(np.float32)
        #: The place that each choice at a place leads to, and whether it is the true next token `[places, choices]`.
        self._next, self._right = self._lead(np.asarray(outputs, int), lengths, chances, rng)
        self._seen: dict[str, int] = {}
        self._verdict: dict[str, np.ndarray] = {}

    @staticmethod
    def _lead(
        outputs: np.ndarray, lengths: np.ndarray, chances: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        places, choices = chances.shape
        first = np.repeat(np.cumsum(lengths) - lengths, lengths)
        output = np.repeat(outputs, lengths)
        here = np.arange(places)[:, None]
        on_text = (here[:, 0] - first < output)[:, None]
        # The chance of each choice or an earlier one, so that one number says which it is.
        right = (rng.random(places)[:, None] < np.cumsum(chances, axis=1)) & on_text
        right[:, 1:] &= ~right[:, :-1]
        # Wrong ones lead astray, to a place that depends on where they come from alone.
        astray = (first + output)[:, None] + (here * 7919 + np.arange(choices) * 104729) % _ASTRAY
        last = (here[:, 0] - first + 1 >= output)[:, None]
        return np.where(right & ~last, here + 1, astray), right

    def precompute_kv(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> None:
        """Takes no time: what idles has enough of it."""
        for one in scheduled:
            self._seen[one.request.id] = len(one.request.tokens)

    def uncached_tokens(self, request: Request) -> int:
        return len(request.tokens) - self._seen.get(request.id, 0)

    def propose(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int) -> Proposal:
        self.spent += self.seconds(
            len(scheduled), sum(self.uncached_tokens(w.request) for w in scheduled), levels, width
        )
        token, parent, logprob, right = self._grow(
            np.array([self._first[int(w.request.id)] + w.request.output_len for w in scheduled]), levels, width
        )
        found: list[Candidates | None] = []
        for i, one in enumerate(scheduled):
            request = one.request
            self._seen[request.id] = len(request.tokens)
            self._verdict[request.id] = right[i]
            found.append(Candidates(token[i], parent[i], logprob[i]))
        return lambda: found

    def _grow(
        self, roots: np.ndarray, levels: int, width: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, parents, log-probabilities of the paths, and whether they are right, `[requests, levels * width]`."""
        n, choices = len(roots), self._said.shape[1]
        row = np.arange(n)[:, None]
        place, path = roots[:, None], np.zeros((n, 1), np.float32)
        out: list[tuple[np.ndarray, ...]] = []
        for level in range(levels):
            value = (path[:, :, None] + self._said[place]).reshape(n, -1)
            best = np.argsort(-value, axis=1, kind="stable")[:, :width]
            above, rank = best // choices, best % choices
            path, origin = value[row, best], place[row, above]
            place = self._next[origin, rank]
            parent = above + (level - 1) * width if level else np.full_like(above, -1)
            out.append((rank, parent, path, self._right[origin, rank]))
        token, parent, logprob, right = (np.concatenate(column, axis=1) for column in zip(*out, strict=True))
        return token.astype(np.int32), parent.astype(np.int32), logprob, right

    def accepted(self, request: Request, draft: Draft) -> list[int]:
        """The nodes of the request's draft, cut from what was proposed last, on the path that is right; in order."""
        # No wrong node leads back to the true text: those that are right are one path.
        return np.flatnonzero(self._verdict[request.id][draft.source]).tolist()

    def seconds(self, requests: int, catch_up: int, levels: int, width: int) -> float:
        return self.cost.seconds(requests, catch_up, levels, width)

    def forget(self, request: Request) -> None:
        self._seen.pop(request.id, None)
        self._verdict.pop(request.id, None)
