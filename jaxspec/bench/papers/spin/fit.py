"""What the paper's text publishes about draft models, and the fit of `difficulty.Model` to it.

No acceptance rate is published and no time of a draft model. `Scene` computes the published numbers from them for a
full batch of eight, without the simulator; `fit` chooses them by least squares. The page shows the residuals, and what
the simulator makes of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxspec.bench.papers.spin.difficulty import (
    BEST_FOR_ALL,
    BEST_WITH_265M,
    SSMS,
    WINDOW,
    WORST_FOR_ALL,
    Ease,
    Model,
    accepted,
)
from jaxspec.bench.papers.spin.systems import CONCURRENCY
from jaxspec.bench.papers.spin.times import AS_MEASURED, LLM, STEP, drafts
from jaxspec.sched.sim.cost import StepLoad

#: §VI-B1 and B2, LLaMA-7B: accepted tokens per second, and ratios. "Baselines" are read as the mean of the single draft
#: models, "the other two methods" as the mean of greedy and ε-greedy. LBSS alone is given twice (Fig. 10 and 11).
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "alpaca": {
        "68M": 32.21, "LBSS (Fig. 10)": 62.33, "LBSS (Fig. 11)": 65.31, "greedy": 32.21, "ε-greedy": 43.78,
        "SPIN / baselines": 2.34, "SPIN / SPIN w/o pipe.": 1.29, "best with 265M": BEST_WITH_265M["alpaca"],
    },
    "cp": {
        "LBSS / baselines": 1.45, "SPIN w/o pipe. / baselines": 1.81, "SPIN / baselines": 1.99,
        "LBSS / other methods": 1.45, "best with 265M": BEST_WITH_265M["cp"],
    },
}  # fmt: skip
SHARE = "best with 265M"
#: Weights: relative errors of 10 % count as much as 4 percentage points of a share, or as 3 % in the order of two
#: models, which should differ by 2 %.
_RELATIVE, _POINTS, _ORDER, _APART = 0.1, 0.04, 0.03, 0.02
#: Share of LBSS's slots that count as random, so that its goodput is that of the simulator: what learning costs.
_EXPLORING = 0.38
#: How far parameters may go from the start, as standard deviations of a weak prior: not all are determined.
_PRIOR = 4.0


@dataclass(frozen=True, slots=True)
class Load:
    """A data set's batch of eight in the simulator: tokens and KV positions of a verification, prompt and output tokens
    of a request."""

    padded: StepLoad
    packed: StepLoad
    prompt: float
    output: float


LOADS: Mapping[str, Load] = {
    "alpaca": Load(StepLoad(40, 0, 1476), StepLoad(40, 0, 641), 21, 68),
    "cp": Load(StepLoad(40, 0, 3950), StepLoad(40, 0, 2254), 124, 172),
}


class Scene:
    """A data set's requests and batches, drawn once: `published(model)` is smooth enough for least squares."""

    def __init__(self, name: str, batches: int, seed: int = 0) -> None:
        self.name, self._load = name, LOADS[name]
        rng = np.random.default_rng(seed)
        count = CONCURRENCY * batches
        self._count, self._seed = count, seed
        self._random, self._explores = rng.integers(len(SSMS), size=count), rng.random(count) < _EXPLORING
        #: Greedy's even shares of a batch: two requests each for all but the largest model.
        self._even = np.arange(count) % CONCURRENCY // 2
        self._place = rng.random((batches, CONCURRENCY))

    def published(self, model: Model) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
        """Every published number as this model predicts it, goodput `[models]` of each draft model alone, and mean
        acceptance rates `[models]`."""
        rates = model.rates(model.ease[self.name], self._count, np.random.default_rng(self._seed))
        tokens, costs = accepted(rates), drafts(model)
        every = np.arange(len(SSMS))
        #: Seconds of a round of each model for 0, 1, … requests `[models, CONCURRENCY + 1]`.
        rounds = np.array(
            [[costs[s].seconds(n, 2 * n, WINDOW, 1) if n else 0.0 for n in range(CONCURRENCY + 1)] for s in SSMS]
        )
        target = AS_MEASURED.targets[LLM]
        padded, packed = target.seconds(self._load.padded), target.seconds(self._load.packed)
        prefill = target.seconds(StepLoad(round(self._load.prompt)))

        def goodput(own: np.ndarray, step: float) -> float:
            """Requests with fewer accepted tokens `own` stay longer; each also costs a prefill."""
            steps = 1 / (1 + own)
            seconds = self._load.output * float(steps.mean()) * step / CONCURRENCY + prefill
            return self._load.output * float((own * steps).mean()) / seconds

        def chosen(choice: np.ndarray) -> tuple[np.ndarray, float]:
            """Accepted tokens of the requests with this choice, and seconds that a batch waits for its drafters."""
            own = tokens[np.arange(self._count), choice]
            present = np.cumsum(1 / (1 + own))
            batch = choice[np.searchsorted(present, self._place * present[-1])]
            using = (batch[..., None] == every).sum(1)
            return own, float(rounds[every, using].max(1).mean())

        single = np.array([goodput(tokens[:, j], padded + rounds[j, -1]) for j in every])
        best = ((1 + tokens) / (padded + rounds[:, -1])).argmax(1)
        own, wait = chosen(np.where(self._explores, self._random, best))
        learned, unpiped = goodput(own, padded + wait), goodput(own, packed + wait)
        spin = goodput(own, max(packed + STEP, wait))  # two micro-batches: one more reading of the weights
        own, wait = chosen(self._even)
        greedy = goodput(own, padded + wait)
        random, wait = chosen(self._random)
        for_all = int(single.argmax())
        mixed = 0.8 * random + 0.2 * tokens[:, for_all]
        epsilon = goodput(mixed, padded + 0.8 * wait + 0.2 * float(rounds[for_all, -1]))
        mean = float(single.mean())
        found = {
            "68M": float(single[0]), "LBSS (Fig. 10)": learned, "LBSS (Fig. 11)": learned, "greedy": greedy,
            "ε-greedy": epsilon, "LBSS / baselines": learned / mean, "SPIN w/o pipe. / baselines": unpiped / mean,
            "SPIN / baselines": spin / mean, "SPIN / SPIN w/o pipe.": spin / unpiped,
            "LBSS / other methods": learned / ((greedy + epsilon) / 2),
            SHARE: float((best == SSMS.index("265M")).mean()),
        }  # fmt: skip
        return {what: found[what] for what in PUBLISHED[self.name]}, single, rates.mean(0)

    def residuals(self, model: Model) -> list[float]:
        """Weighted residuals: the published numbers, the order of the single models, and the order of their rates."""
        found, single, rates = self.published(model)
        published = PUBLISHED[self.name]
        out = [
            (found[what] - value) / _POINTS if what == SHARE else float(np.log(found[what] / value)) / _RELATIVE
            for what, value in published.items()
        ]
        worst = [SSMS.index(name) for name in sorted(WORST_FOR_ALL)]
        top = SSMS.index(BEST_FOR_ALL[self.name])
        others = [j for j in range(len(SSMS)) if j not in worst]
        out += [_order(single[j], single[top]) for j in range(len(SSMS)) if j != top]
        out += [_order(single[j], single[others].min()) for j in worst]
        # The paper calls 68M bad for its acceptance and 1.4B for its time: larger models guess better.
        return out + [_order(rates[j], rates[j + 1]) for j in range(len(SSMS) - 1)]


def _order(less: float, more: float) -> float:
    return max(0.0, float(np.log(less / more)) + _APART) / _ORDER


#: Where the fit starts. Least squares finds the nearest minimum, and there are several: models could also be alike in
#: time and differ in acceptance. This start is two weak models and three good ones, the largest of them slow.
START = Model(
    capability=(0.0, 0.0, 1.5, 1.5, 1.5), slope=(1.0, 1.0, 0.5, 0.5, 0.5), residual=0.7,
    ease={"alpaca": Ease(0.0, 0.3), "cp": Ease(1.5, 0.5)}, drafting=0.7, largest=4.0,
)  # fmt: skip


def fit(batches: int = 1000, seed: int = 0, start: Model = START) -> Model:
    """The model with the least squares of residuals over both data sets' published numbers.

    `batches` of eight requests are drawn; of fewer, the result is less exact.
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped]  # half a second; only for the fit

    scenes = [Scene(name, batches, seed) for name in PUBLISHED]
    origin = _vector(start)

    def residuals(moved: np.ndarray) -> np.ndarray:
        model = _model(origin + moved - 1)
        return np.array([r for scene in scenes for r in scene.residuals(model)] + ((moved - 1) / _PRIOR).tolist())

    # Steps of finite differences are relative, so that parameters are counted from 1.
    found = least_squares(residuals, np.ones(len(origin)), diff_step=0.05, max_nfev=30)
    return _model(origin + found.x - 1)


def loss(model: Model, batches: int = 1000, seed: int = 0) -> float:
    """Sum of the squared residuals."""
    return sum(r * r for name in PUBLISHED for r in Scene(name, batches, seed).residuals(model))


def _vector(model: Model) -> np.ndarray:
    alpaca, cp = model.ease["alpaca"], model.ease["cp"]
    positive = [*model.slope[1:], model.residual, alpaca.spread, cp.spread, model.drafting, model.largest]
    return np.array([*model.capability, cp.mean, *np.log(positive)])


def _model(x: np.ndarray) -> Model:
    n = len(SSMS)
    slope, (residual, alpaca, cp, drafting, largest) = np.exp(x[n + 1 : 2 * n]), np.exp(x[2 * n :]).tolist()
    return Model(
        tuple(x[:n].tolist()), (1.0, *slope.tolist()), residual,
        {"alpaca": Ease(0.0, alpaca), "cp": Ease(float(x[n]), cp)}, drafting, largest,
    )  # fmt: skip
