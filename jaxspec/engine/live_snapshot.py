"""What the live view shows at one moment: the engine, its requests, and token trees that it has just verified."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from jaxspec.sched.request import Request, RequestStatus
from jaxspec.sched.slo import current_slack
from jaxspec.sched.waiting_reason import QueueState, why_throttled, why_waiting

if TYPE_CHECKING:
    from jaxspec.sched.scheduler import Scheduler

#: Most requests of a snapshot.
MAX_REQUESTS = 64
#: Places of them that running requests have in any case, so that one sees what the waiting ones wait for.
_KEPT_FOR_RUNNING = 32


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One request. `tenant` is whose it is; times are in seconds.

    state        waiting, paused, swapped (without a slot), prefill, decoding, throttled (runs, skips a step)
    reason       why it waits or skips steps, in plain words; None: it does neither
    place        requests ahead of it in the queue; None: it runs
    prompt_done  prompt tokens whose KV is committed
    predicted    predicted output tokens; None without a prediction
    slack        until it misses `slack_of`, "tpot" or "ttft"; None without a target that counts now
    """

    id: str
    tenant: str
    state: str
    reason: str | None
    place: int | None
    age: float
    prompt_tokens: int
    prompt_done: int
    output_tokens: int
    max_tokens: int
    predicted: float | None
    proposed: int
    accepted: int
    preemptions: int
    tpot: float | None
    ttft: float | None
    slack_of: str | None
    slack: float | None


@dataclass(frozen=True, slots=True)
class LiveEnd:
    """A request that has ended: at `time` on the engine's clock, `took` seconds after its arrival."""

    time: float
    id: str
    output_tokens: int
    finish_reason: str
    took: float


@dataclass(frozen=True, slots=True)
class LiveNode:
    """A node of a verified token tree. parent: its index, -1 for the root. drafters: who proposed it; none for the
    root, which was known, and for the bonus token, which the target added."""

    text: str
    parent: int
    depth: int
    accepted: bool
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LiveTree:
    """A request's verified token tree: nodes in preorder, the root first, and the bonus token at the end. `age` in
    seconds."""

    request_id: str
    tenant: str
    age: float
    nodes: tuple[LiveNode, ...]
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class LiveSnapshot:
    """The engine at one moment; `time` on its clock. Speeds and shares are of the last seconds; None: nothing was
    measured. `trees` are by tenant, the newest last."""

    time: float
    policy: Mapping[str, str]
    #: What the order puts first, in words.
    rule: str
    drafters: tuple[str, ...]
    running: int
    waiting: int
    paused: int
    swapped: int
    slots: int
    kv_usage: float
    kv_pages: int
    tokens_per_second: float
    acceptance_rate: float | None
    mean_accepted_length: float | None
    #: At most `MAX_REQUESTS`: the waiting ones in the order of the queue, then the running ones.
    requests: tuple[LiveRequest, ...] = ()
    #: Those that ended in the last seconds, so that a watcher may miss a snapshot; at most `MAX_REQUESTS`.
    ended: tuple[LiveEnd, ...] = ()
    trees: dict[str, LiveTree] = field(default_factory=dict[str, LiveTree])


def live_requests(scheduler: Scheduler, scheduled: Collection[str], now: float) -> Iterator[LiveRequest]:
    """The requests to show. `scheduled`: ids of those in the last steps."""
    queue = QueueState.of(scheduler)
    running = min(len(scheduler.running), _KEPT_FOR_RUNNING)
    waiting = list(islice(scheduler.waiting.ahead(), MAX_REQUESTS - running))
    for place, request in enumerate(waiting):
        yield _live(request, now, request.status.value, why_waiting(request, place, queue), place)
    for request in scheduler.running[: MAX_REQUESTS - len(waiting)]:
        if request.id in scheduled:
            yield _live(request, now, "decoding" if request.decoding else "prefill")
        else:
            yield _live(request, now, "throttled", why_throttled(request, queue))


def _live(request: Request, now: float, state: str, reason: str | None = None, place: int | None = None) -> LiveRequest:
    slack_of, slack = current_slack(request, now) or (None, None)
    computed = 0 if request.status is RequestStatus.WAITING else request.computed
    return LiveRequest(
        request.id, request.tenant, state, reason, place, now - request.arrival, request.prompt_len,
        min(computed, request.prompt_len), request.output_len, request.max_tokens, request.predicted_len,
        request.proposed, request.accepted, request.preemptions, request.slo.tpot, request.slo.ttft, slack_of, slack,
    )  # fmt: skip
