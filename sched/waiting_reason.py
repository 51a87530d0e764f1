"""Why a request does not run, in plain words: for people who watch, no policy reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Self

from jaxspec.sched.request import Request, RequestStatus

if TYPE_CHECKING:
    from jaxspec.sched.scheduler import Scheduler


class Obstacle(Enum):
    """What keeps the first waiting request from running, in a few words."""

    BATCH = "the running batch has to end first"
    MORE = "the next batch waits for more requests"
    SLOT = "no free slot"
    PAGES = "no free KV pages"
    KEPT = "free KV pages are kept for running requests"
    PACE = "the pace lets few prompts run"
    STEP = "no room in the step"


@dataclass(frozen=True, slots=True)
class QueueState:
    """What decides about the waiting requests, between two steps.

    running, slots  requests that have a slot, and slots there are
    batches         whether a batch runs to its end before the next one starts (`batching: dynamic`)
    wanted_pages    KV pages that the first waiting request needs
    free_pages      pages that are free or held by paused requests, which would lose them
    fits            whether the memory policy would admit the first one (`memory: defer`)
    paced           whether a pace throttles: some running request has a TPOT SLO
    rule            what the order puts first (`Order.rule`)
    """

    running: int
    slots: int
    batches: bool
    wanted_pages: int
    free_pages: int
    fits: bool
    paced: bool
    rule: str

    @classmethod
    def of(cls, scheduler: Scheduler) -> Self:
        """The state of a scheduler's queue. Changes nothing there."""
        head, kv = scheduler.waiting.first(), scheduler.kv
        return cls(
            len(scheduler.running),
            scheduler.batching.size,
            scheduler.batching.runs_to_end,
            0 if head is None else max(0, kv.missing_pages(head)),
            scheduler.pool.num_free + scheduler.waiting.paused_pages,
            head is None or head.status is RequestStatus.PAUSED or kv.fits(head),
            scheduler.pace.throttles and any(r.slo.tpot is not None for r in scheduler.running),
            scheduler.order.rule,
        )

    @property
    def obstacle(self) -> Obstacle:
        """What keeps the first waiting request from running."""
        if self.batches:
            return Obstacle.BATCH if self.running else Obstacle.MORE
        if self.running >= self.slots:
            return Obstacle.SLOT
        if self.wanted_pages > self.free_pages:
            return Obstacle.PAGES
        if not self.fits:
            return Obstacle.KEPT
        return Obstacle.PACE if self.paced else Obstacle.STEP


def why_waiting(request: Request, ahead: int, queue: QueueState) -> str:
    """Why a request without a slot has none; `ahead`: waiting requests that go before it."""
    place = "It is next." if not ahead else f"{_requests(ahead)} ahead of it: {queue.rule}."
    return " ".join(filter(None, (_lost(request), _obstacle(queue), place)))


def why_throttled(request: Request, queue: QueueState) -> str:
    """Why a running request had no part in the last step."""
    what = "It skips this step" if request.decoding else "Its prompt waits"
    if queue.paced:
        return f"{what}: the pace keeps steps short, so that requests with a TPOT SLO get their tokens in time."
    return f"{what}: the tokens of the step went to other requests."


def _lost(request: Request) -> str:
    """What a request that ran before has lost."""
    if request.status is RequestStatus.PAUSED:
        return "Paused: a request that goes first took its slot; it keeps its KV pages."
    if request.status is RequestStatus.SWAPPED:
        return "Swapped out: others needed its KV pages; its KV is in host memory."
    if request.recompute_until is not None:
        return "Preempted: others needed its KV pages; its KV has to be computed again."
    return ""


def _obstacle(queue: QueueState) -> str:
    """What keeps the first waiting request from running, with its numbers."""
    slots = "The only slot is taken." if queue.slots == 1 else f"All {queue.slots} slots are taken."
    pages = f"No free KV pages: the next request needs {queue.wanted_pages}, {queue.free_pages} are free."
    return {
        Obstacle.BATCH: "The running batch has to end first.",
        Obstacle.MORE: "The next batch waits for more requests.",
        Obstacle.SLOT: slots,
        Obstacle.PAGES: pages,
        Obstacle.KEPT: "The free KV pages are kept for running requests: the next answer would not fit.",
        Obstacle.PACE: "The pace lets few prompts run while requests have a TPOT SLO.",
        Obstacle.STEP: "The step has no room for more prompts.",
    }[queue.obstacle]


def _requests(count: int) -> str:
    return "1 request is" if count == 1 else f"{count} requests are"
