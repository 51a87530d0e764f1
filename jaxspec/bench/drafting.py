"""What deciding on drafts costs: time of the speculator's part of an iteration, with a drafter that answers at once.

Every request has a candidate tree of all levels and four nodes a level, and gets what an imaginary target accepts."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from statistics import median, quantiles

import numpy as np

from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slo import Slo
from jaxspec.sched.spec.drafter import Proposal, SamplingOf, SharedDevice
from jaxspec.sched.spec.speculator import DEPTH, Speculator
from jaxspec.sched.spec.trees import AdaServe, Candidates, EqualGreedy, GlobalGreedy, TreePolicy
from jaxspec.sched.timing import StepTimes

#: Nodes of a level.
WIDTH = 4
#: Seconds of a step with at most so many draft tokens a request, so that all levels are drafted; beyond, of as many
#: steps.
_STEP, _DRAFTS = 0.03, 8
#: Candidate trees that are made in advance, and given out in turns.
_TREES = 256
#: The targets of requests, in turns; half of them have none.
_TARGETS = (Slo(), Slo(tpot=0.012), Slo(), Slo(tpot=0.05))


class Drafter(SharedDevice):
    """Beams that were made in advance."""

    name, widths = "ready", (WIDTH,)

    def __init__(self, rng: np.random.Generator) -> None:
        self._beams = [_beam(rng) for _ in range(_TREES)]
        self._next = 0

    def uncached_tokens(self, request: Request) -> int:
        return 1

    def propose(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int) -> Proposal:
        first, self._next = self._next, self._next + 1
        n = levels * WIDTH
        found: list[Candidates | None] = []
        for i in range(len(scheduled)):
            beam = self._beams[(first * len(scheduled) + i) % _TREES]
            found.append(Candidates(beam.token[:n], beam.parent[:n], beam.logprob[:n]))
        return lambda: found

    def seconds(self, requests: int, catch_up: int, levels: int, width: int) -> float:
        return 1e-6

    def forget(self, request: Request) -> None: ...


def _beam(rng: np.random.Generator) -> Candidates:
    """`DEPTH` levels of `WIDTH` nodes, each hanging on one of the level before, the likeliest first."""
    parent, logprob, above = [], [], np.zeros(1)
    for level in range(DEPTH):
        own = rng.integers(len(above), size=WIDTH)
        chance = above[own] + np.log(rng.uniform(0.05, 0.95, WIDTH))
        order = np.argsort(-chance)
        parent += (own[order] + (level - 1) * WIDTH).tolist() if level else [-1] * WIDTH
        above = chance[order]
        logprob += above.tolist()
    token = np.arange(DEPTH * WIDTH, dtype=np.int32)
    return Candidates(token, np.asarray(parent, np.int32), np.asarray(logprob, np.float32))


def measure(requests: int, iterations: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """By `tree`, CPU milliseconds of an iteration's decisions (how far to draft, what to verify) and of what is learned
    after it, and the nodes verified in one. The first tenth is a warm-up, left out."""
    nodes, size = _DRAFTS * requests, (1 + _DRAFTS) * requests
    step = StepTimes({k * size: k * _STEP for k in range(1, 1 + DEPTH * WIDTH)})
    policies: dict[str, TreePolicy | None] = {
        "auto": None,
        "equal_greedy": EqualGreedy(nodes),
        "global_greedy": GlobalGreedy(nodes),
        "adaserve": AdaServe(16, step),
    }
    return {name: _measure(policy, step, size, requests, iterations, seed) for name, policy in policies.items()}


def _measure(
    policy: TreePolicy | None, step: StepTimes, verify_budget: int, requests: int, iterations: int, seed: int
) -> dict[str, float]:
    draw, prompt, adaptive = random.Random(seed), 16, isinstance(policy, AdaServe)
    speculator = Speculator(
        [Drafter(np.random.default_rng(seed))], step, policy, adaptive=adaptive,
        verify_budget=verify_budget if adaptive else None,
        calibrate=policy is not None,
    )  # fmt: skip
    running = [
        Request(str(i), prompt, [7] * (prompt + 1), 10**9, 0.0, slo=_TARGETS[i % len(_TARGETS)], first_token=0.0)
        for i in range(requests)
    ]
    deciding: list[float] = []
    learning: list[float] = []
    nodes, now = 0, 0.0
    for _ in range(iterations):
        for request in running:
            request.computed = len(request.tokens) - 1
        begun = time.thread_time()
        ahead = speculator.lookahead(running, now)
        between = time.thread_time()
        scheduled = [ScheduledRequest(r, r.computed, 1, ahead.drafts, ahead.levels) for r in running]
        again = time.thread_time()
        drafts = speculator.draft(scheduled, lambda _: None, requests, now)
        decided = time.thread_time()
        now += _STEP
        accepted = {}
        for request in running:
            draft = drafts.get(request.id)
            path: list[int] = []
            while draft is not None and draw.random() < 0.7:
                last = path[-1] if path else -1
                below = [i for i, above in enumerate(draft.parent.tolist()) if above == last]
                if not below:
                    break
                path.append(below[0])
            accepted[request.id] = path
        observing = time.thread_time()
        for request in running:
            speculator.observe(request, accepted[request.id])
        learned = time.thread_time()
        for request in running:
            request.tokens += [7] * (1 + len(accepted[request.id]))
        deciding.append(1e3 * (between - begun + decided - again))
        learning.append(1e3 * (learned - observing))
        nodes += sum(len(draft) for draft in drafts.values())
    kept = iterations // 10
    return {
        "median ms": median(deciding[kept:]),
        "p99 ms": quantiles(deciding[kept:], n=100)[98] if len(deciding) - kept > 1 else deciding[-1],
        "learning ms": median(learning[kept:]),
        "nodes": nodes / iterations,
    }
