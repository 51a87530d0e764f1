"""CPU time of the speculator's decisions in a step, with a drafter that takes no time.

Every request gets a candidate tree with all levels and four nodes per level. Acceptance of its nodes is drawn at random
in place of a target model."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from statistics import median, quantiles

import numpy as np

from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.plan import Plan, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slo import Slo
from jaxspec.sched.slots import TREES, SlotContext
from jaxspec.sched.spec.draft_room import DraftRoom
from jaxspec.sched.spec.drafter import Proposal, SamplingOf, SharedDevice
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.policy import DEPTH, TreePolicy
from jaxspec.sched.timing import StepTimes

#: Nodes per level.
WIDTH = 4
#: A step takes `_STEP` seconds with up to `_DRAFTS` draft tokens per request, twice that with up to twice as many
#: tokens and so on. So all levels are drafted.
_STEP, _DRAFTS = 0.03, 8
#: Candidate trees, generated in advance and used in rotation.
_TREES = 256
#: SLOs, assigned to requests in rotation; half of the requests have none.
_SLOS = (Slo(), Slo(tpot=0.012), Slo(), Slo(tpot=0.05))


class Drafter(SharedDevice):
    """Proposes candidate trees that were generated in advance."""

    name, widths = "ready", (WIDTH,)

    def __init__(self, rng: np.random.Generator) -> None:
        self._beams = [_beam(rng) for _ in range(_TREES)]
        self._next = 0

    def uncached_tokens(self, request: Request) -> int:
        return 1

    def propose(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int, least: float = 0.0
    ) -> Proposal:
        first, self._next = self._next, self._next + 1
        n = levels * WIDTH
        found: list[Candidates | None] = []
        for i in range(len(scheduled)):
            beam = self._beams[(first * len(scheduled) + i) % _TREES]
            found.append(Candidates(beam.token[:n], beam.parent[:n], beam.logprob[:n]))
        return lambda: found

    def seconds(self, requests: int, uncached: int, levels: int, width: int) -> float:
        return 1e-6


def _beam(rng: np.random.Generator) -> Candidates:
    """A random tree: `DEPTH` levels of `WIDTH` nodes, each with a parent in the level above, most likely first."""
    parent, logprob, above = [], [], np.zeros(1)
    for level in range(DEPTH):
        parents = rng.integers(len(above), size=WIDTH)
        logprobs = above[parents] + np.log(rng.uniform(0.05, 0.95, WIDTH))
        order = np.argsort(-logprobs)
        parent += (parents[order] + (level - 1) * WIDTH).tolist() if level else [-1] * WIDTH
        above = logprobs[order]
        logprob += above.tolist()
    token = np.arange(DEPTH * WIDTH, dtype=np.int32)
    return Candidates(token, np.asarray(parent, np.int32), np.asarray(logprob, np.float32))


def measure(requests: int, iterations: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """For each `tree` setting: CPU milliseconds per step for the decisions (lookahead, node selection) and for learning
    from the outcome, and the nodes verified per step. The times omit the first tenth of the iterations (warm-up)."""
    nodes, size = _DRAFTS * requests, (1 + _DRAFTS) * requests
    step = StepTimes({k * size: k * _STEP for k in range(1, 1 + DEPTH * WIDTH)})
    policies: dict[str, TreePolicy] = {}
    for name in TREES.names:
        own = {"draft_nodes": nodes} if TREES[name].shares_nodes else {}
        config = PolicyConfig.model_validate({"tree": name, **own})
        policies[name] = TREES.build(SlotContext(config, requests, times=step))
    return {name: _measure(policy, step, size, requests, iterations, seed) for name, policy in policies.items()}


def _measure(
    policy: TreePolicy, step: StepTimes, verify_budget: int, requests: int, iterations: int, seed: int
) -> dict[str, float]:
    rng, prompt = random.Random(seed), 16
    drafter = Drafter(np.random.default_rng(seed))
    speculator = Speculator([drafter], step, policy, verify_budget=verify_budget)
    running = [
        Request(str(i), prompt, [7] * (prompt + 1), 10**9, 0.0, slo=_SLOS[i % len(_SLOS)], first_token=0.0)
        for i in range(requests)
    ]
    deciding: list[float] = []
    learning: list[float] = []
    nodes, now = 0, 0.0
    for _ in range(iterations):
        for request in running:
            request.computed = len(request.tokens) - 1
        lookahead_start = time.thread_time()
        lookahead = speculator.lookahead(running, now)
        lookahead_end = time.thread_time()
        scheduled = [ScheduledRequest(r, r.computed, 1, lookahead.drafts, lookahead.levels) for r in running]
        draft_start = time.thread_time()
        drafts = speculator.draft(
            scheduled, lambda _: None, DraftRoom.of(Plan(tuple(scheduled), draft_nodes=DEPTH * WIDTH * requests)), now
        )
        draft_end = time.thread_time()
        now += _STEP
        accepted = {}
        for request in running:
            draft = drafts.get(request.id)
            path: list[int] = []
            while draft is not None and rng.random() < 0.7:
                last = path[-1] if path else -1
                children = [i for i, parent in enumerate(draft.parent.tolist()) if parent == last]
                if not children:
                    break
                path.append(children[0])
            accepted[request.id] = path
        observe_start = time.thread_time()
        for request in running:
            speculator.observe(request, accepted[request.id])
        observe_end = time.thread_time()
        for request in running:
            request.tokens += [7] * (1 + len(accepted[request.id]))
        deciding.append(1e3 * (lookahead_end - lookahead_start + draft_end - draft_start))
        learning.append(1e3 * (observe_end - observe_start))
        nodes += sum(len(draft) for draft in drafts.values())
    warmup = iterations // 10
    return {
        "median ms": median(deciding[warmup:]),
        "p99 ms": quantiles(deciding[warmup:], n=100)[98] if len(deciding) - warmup > 1 else deciding[-1],
        "learning ms": median(learning[warmup:]),
        "nodes": nodes / iterations,
    }
