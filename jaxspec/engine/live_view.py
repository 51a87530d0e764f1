"""The live view: snapshots of the engine for those who watch, taken in the engine's thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxspec.engine.live_snapshot import MAX_REQUESTS, LiveEnd, LiveNode, LiveSnapshot, LiveTree, live_requests
from jaxspec.engine.micro_batch import MicroBatch
from jaxspec.sched.plan import Plan
from jaxspec.sched.slots import SLOTS
from jaxspec.sched.spec.merging import Drafted

if TYPE_CHECKING:
    from jaxspec.config import EngineConfig
    from jaxspec.engine.loop import EngineLoop
    from jaxspec.outputs import RequestMetrics

log = logging.getLogger(__name__)

#: Seconds between two snapshots.
INTERVAL = 0.2
#: Seconds over which speeds are measured, and for which snapshots name a request that has ended.
_WINDOW = 3.0
#: Most draft nodes of a tree that is shown; in preorder, so parents are among them.
_MAX_NODES = 64

OnSnapshot = Callable[[LiveSnapshot], None]


class _Counts(NamedTuple):
    """The engine's counters at one time."""

    time: float
    tokens: int
    proposed: int
    accepted: int
    verifications: int


class _Verified(NamedTuple):
    """The last verified tree of a tenant. path: accepted nodes, the root included; bonus: the token after them."""

    time: float
    request_id: str
    root: int
    drafted: Drafted
    path: list[int]
    bonus: int


class LiveView:
    """Takes snapshots of an engine loop for its watchers.

    Without watchers, `watched` is false, and the loop calls nothing else here. Only the engine's thread uses it, except
    for `add`; `watchers` is replaced as a whole.
    """

    def __init__(self, loop: EngineLoop, config: EngineConfig) -> None:
        self._loop = loop
        self._slots = config.max_num_seqs
        self._policy = {slot.setting: str(getattr(config, slot.setting)) for slot in SLOTS}
        self._adding = threading.Lock()
        #: Called with each snapshot.
        self.watchers: tuple[OnSnapshot, ...] = ()
        self._due = 0.0
        self._scheduled: frozenset[str] = frozenset()  # ids of the requests in the last steps
        self._verified: dict[str, _Verified] = {}  # by tenant, the newest last
        self._counts: deque[_Counts] = deque()
        self._ended: deque[LiveEnd] = deque(maxlen=MAX_REQUESTS)

    def add(self, on_snapshot: OnSnapshot) -> Callable[[], None]:
        """Add a watcher, from any thread. -> removes it."""
        with self._adding:
            self.watchers = (*self.watchers, on_snapshot)

        def remove() -> None:
            with self._adding:
                self.watchers = tuple(other for other in self.watchers if other is not on_snapshot)

        return remove

    @property
    def watched(self) -> bool:
        """Whether there is a watcher."""
        return bool(self.watchers)

    def verified(self, batch: MicroBatch, decision: np.ndarray, now: float) -> None:
        """A micro-batch was verified; `decision` is what the device decided (`MicroBatch.requests`)."""
        for one in batch.requests(decision):
            request = one.state.request
            drafted = self._loop.speculator.drafted.get(request.id)
            if one.path is None or drafted is None or one.state.finish_reason is not None:
                continue
            root = request.tokens[one.scheduled.known - 1]
            self._verified.pop(request.tenant, None)
            self._verified[request.tenant] = _Verified(now, request.id, root, drafted, one.path, one.tokens[-1])

    def ended(self, request_id: str, metrics: RequestMetrics, reason: str) -> None:
        """A request has ended."""
        assert metrics.finished is not None and metrics.e2e is not None
        self._ended.append(LiveEnd(metrics.finished, request_id, metrics.output_tokens, reason, metrics.e2e))

    def planned(self, plan: Plan | None, now: float) -> None:
        """A step was launched, or there was none to run."""
        if plan is not None:
            self._scheduled |= {s.request.id for s in plan.scheduled}
        self.look(now)

    def look(self, now: float) -> None:
        """Send a snapshot to the watchers if one is due. A watcher that fails is logged."""
        if now < self._due:
            return
        self._due = now + INTERVAL
        try:
            snapshot = self._snapshot(now)
        except Exception:
            log.exception("a snapshot for the live view failed")
            return
        finally:
            self._scheduled = frozenset()
        for tell in self.watchers:
            try:
                tell(snapshot)
            except Exception:
                log.exception("a watcher failed")

    def _snapshot(self, now: float) -> LiveSnapshot:
        scheduler, speculator = self._loop.scheduler, self._loop.speculator
        first, last = self._measure(now)
        proposed, verifications = last.proposed - first.proposed, last.verifications - first.verifications
        accepted = last.accepted - first.accepted
        names = [drafter.name for drafter in speculator.drafters]
        while self._ended and self._ended[0].time < now - _WINDOW:
            self._ended.popleft()
        return LiveSnapshot(
            time=now,
            policy=self._policy,
            rule=scheduler.order.rule,
            drafters=tuple(names),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting - scheduler.num_paused - scheduler.num_swapped,
            paused=scheduler.num_paused,
            swapped=scheduler.num_swapped,
            slots=self._slots,
            kv_usage=scheduler.pool.usage,
            kv_pages=scheduler.pool.num_pages,
            tokens_per_second=(last.tokens - first.tokens) / max(last.time - first.time, INTERVAL),
            acceptance_rate=accepted / proposed if proposed else None,
            mean_accepted_length=1 + accepted / verifications if verifications else None,
            requests=tuple(live_requests(scheduler, self._scheduled | self._loop.under_way_ids(), now)),
            ended=tuple(self._ended),
            trees={tenant: self._tree(tenant, verified, names, now) for tenant, verified in self._verified.items()},
        )

    def _measure(self, now: float) -> tuple[_Counts, _Counts]:
        """The counters at the begin of the window, and now."""
        c = self._loop.counters
        s, counts = c.speculation, self._counts
        counts.append(_Counts(now, c.generation_tokens, s.proposed, s.accepted, s.verifications))
        if counts[0].tokens > counts[-1].tokens:  # they were reset
            self._counts = counts = deque([counts[-1]])
        while counts[0].time < now - _WINDOW:
            counts.popleft()
        return counts[0], counts[-1]

    def _tree(self, tenant: str, verified: _Verified, names: list[str], now: float) -> LiveTree:
        text, draft, proposers = self._loop.token_text, verified.drafted.draft, verified.drafted.proposers()
        accepted, shown = set(verified.path), min(len(draft), _MAX_NODES)
        nodes = [LiveNode(text(verified.root), -1, 0, True)]
        for i in range(shown):
            token, parent, depth = int(draft.token[i]), int(draft.parent[i]) + 1, int(draft.depth[i])
            who = tuple(names[drafter] for drafter in proposers[i])
            nodes.append(LiveNode(text(token), parent, depth, i + 1 in accepted, who))
        if (end := verified.path[-1]) <= shown:
            nodes.append(LiveNode(text(verified.bonus), end, nodes[end].depth + 1, True))
        age = now - verified.time
        return LiveTree(verified.request_id, tenant, age, tuple(nodes), len(draft), len(accepted) - 1)
