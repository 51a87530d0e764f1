"""SPIN's requests: acceptance rates per draft model, from a model that is fitted to the published facts (`fit.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxspec.sched.sim.draft_cost import SPIN_SSMS
from jaxspec.sched.sim.workload import Lengths, Workload

SSMS = tuple(SPIN_SSMS)
#: Draft tokens per chain: the paper's prediction window, whose size it does not give.
WINDOW = 4

#: Fig. 2: share of requests that 265M serves best.
BEST_WITH_265M: Mapping[str, float] = {"alpaca": 0.03, "cp": 0.40}
#: §VI-B1: the draft model that is best for all requests; 68M and 1.4B are the two worst everywhere.
BEST_FOR_ALL: Mapping[str, str] = {"alpaca": "1.1B", "cp": "265M"}
WORST_FOR_ALL = frozenset({"68M", "1.4B"})


@dataclass(frozen=True, slots=True)
class Ease:
    """Normal distribution of the ease of a data set's requests; `spread`: standard deviation."""

    mean: float
    spread: float


@dataclass(frozen=True, slots=True)
class Model:
    """What the paper does not give about its draft models and requests, so that it is fitted (`fit.fit`).

    capability, slope: logit of each draft model's acceptance rate at ease 0, and its slope in the ease. residual:
    standard deviation of what the ease does not explain, in logits. ease: by data set; Alpaca's mean and the slope of
    68M set the scale. drafting: draft times relative to LLaMA-7B's in proportion to the parameters; largest: a further
    factor on those of 1.4B, which the paper calls bad for its time and not for its acceptance (§VI-B1).
    """

    capability: tuple[float, ...]
    slope: tuple[float, ...]
    residual: float
    ease: Mapping[str, Ease]
    drafting: float = 1.0
    largest: float = 1.0

    def rates(self, ease: Ease, count: int, rng: np.random.Generator, residual: float | None = None) -> np.ndarray:
        """P(a draft token is accepted, given that those before it are) of requests with each model `[count, models]`:
        sigmoid(capability + slope · ease + `residual` · z) with a standard normal z for each pair."""
        drawn = ease.mean + ease.spread * rng.standard_normal((count, 1))
        logit = np.asarray(self.capability) + np.asarray(self.slope) * drawn
        logit += (self.residual if residual is None else residual) * rng.standard_normal(logit.shape)
        return np.clip(1 / (1 + np.exp(-logit)), 0.01, 0.99)


#: The result of `fit.fit()`, rounded. Only the worst models are known for CIP: its ease is assumed to be in the middle.
FITTED = Model(
    capability=(0.34, 0.38, 1.84, 2.07, 2.13), slope=(1.0, 1.44, 0.30, 0.21, 0.43), residual=1.14,
    ease={"alpaca": Ease(0.0, 0.22), "cp": Ease(1.38, 0.59), "cip": Ease(0.69, 0.41)}, drafting=0.426, largest=5.42,
)  # fmt: skip


def accepted(rates: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Expected accepted tokens of a chain, for acceptance rates `[...]`."""
    return (rates[..., None] ** np.arange(1, window + 1)).sum(-1)


@dataclass(frozen=True, slots=True)
class Requests:
    """A workload, and the acceptance rates `[requests, models]` of each draft model for its requests."""

    work: Workload
    rates: np.ndarray


@dataclass(frozen=True, slots=True)
class Dataset:
    """Lengths and ease of one data set, or of several that are mixed equally; `residual`: None: as fitted."""

    lengths: Sequence[Lengths]
    ease: Sequence[Ease]
    residual: float | None = None

    def requests(self, count: int, seed: int) -> Requests:
        """Requests that all arrive at time 0. The same seed gives the same requests.

        A mix has equally many of each data set. Output lengths are stratified: every seed has about as many long
        answers, which otherwise decide the result.
        """
        rng = np.random.default_rng(seed)
        kind = rng.permutation(np.arange(count) % len(self.lengths))
        inputs, outputs, rates = np.empty(count, int), np.empty(count, int), np.empty((count, len(SSMS)))
        for number, (table, ease) in enumerate(zip(self.lengths, self.ease, strict=True)):
            own = np.flatnonzero(kind == number)
            place = (rng.permutation(len(own)) + rng.random(len(own))) / max(1, len(own))
            rows = np.argsort(table.output, kind="stable")[(place * len(table)).astype(int)]
            inputs[own], outputs[own] = table.input[rows], table.output[rows]
            rates[own] = FITTED.rates(ease, len(own), rng, self.residual)
        return Requests(Workload(np.zeros(count), inputs, outputs, np.full(count, np.nan)), rates)

    def differing(self, residual: float) -> Dataset:
        """A copy with another residual."""
        return replace(self, residual=residual)

    def writing(self, output: int) -> Dataset:
        """A copy with output lengths uniform between half and one and a half times `output` tokens."""
        lengths = np.arange(max(1, output // 2), 3 * output // 2)
        unknown = np.full(lengths.shape, np.nan)
        return replace(
            self, lengths=[Lengths(np.resize(t.input, lengths.shape), lengths, unknown) for t in self.lengths]
        )
