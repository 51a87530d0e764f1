"""The interface of scheduler and engine: the plan of one step, and its results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from jaxspec.sched.request import Request

#: Names drafts that the host has not read: node i of a round's chains is `FIRST_DRAFT` - i (`sched.spec.ahead`).
FIRST_DRAFT = -2


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Compute `count` known tokens of `request` from position `start`. Pages for all of them are allocated.

    If the last one is `UNKNOWN`, it is the only one, and comes as many positions later as the step under way accepts
    drafts, at most `Request.pending_drafts`. There are pages for them.
    """

    request: Request
    start: int
    count: int
    #: Most draft nodes after the last known token. All requests together have at most `Plan.draft_nodes`.
    drafts: int = 0
    #: Most levels of the draft tree; pages are reserved for them.
    levels: int = 0
    #: Whether the step samples a new token: it reaches the end of the tokens that are known when it is planned.
    samples: bool = field(init=False)
    #: Tokens among them that had been computed before the request was preempted.
    recomputes: int = field(init=False)

    def __post_init__(self) -> None:
        until = self.request.recompute_until
        object.__setattr__(self, "samples", self.end == len(self.request.tokens))
        object.__setattr__(self, "recomputes", 0 if until is None else max(0, min(self.end, until) - self.start))

    @property
    def end(self) -> int:
        """The position after its known tokens."""
        return self.start + self.count

    @property
    def known(self) -> int:
        """Number of the request's tokens before those that this gives; valid until the results are processed. More than
        `end` if the step before, under way when this was planned, has accepted drafts since."""
        return self.request.num_known if self.samples else self.end

    @property
    def decodes(self) -> bool:
        """Whether it computes the last token only, an output token."""
        return self.samples and self.count == 1 and self.start >= self.request.prompt_len

    @property
    def reads_all(self) -> bool:
        """Whether the logits of all positions are read: a chunk that begins in a prompt with `prompt_logprobs`.

        After a preemption such a chunk may continue into the output.
        """
        return self.request.prompt_logprobs and self.start < self.request.prompt_len

    @property
    def logit_rows(self) -> int:
        """Positions whose logits are read: all, or the last one if it samples."""
        return self.count if self.reads_all else int(self.samples)

    @property
    def last_row(self) -> int:
        """The logit row of the last position, relative to the request's first row."""
        return self.count - 1 if self.reads_all else 0

    def check(self, result: RequestResult) -> None:
        """Raise `ValueError` if this cannot be its result."""
        request, new = self.request, result.tokens
        if result.finish_reason is None:
            if bool(new) != self.samples:
                raise ValueError(f"request {request.id!r}: {len(new)} tokens, but samples is {self.samples}")
            if self.known - request.prompt_len + len(new) >= request.max_tokens:
                raise ValueError(f"request {request.id!r} continues beyond its max_tokens of {request.max_tokens}")
        if not 0 <= result.accepted <= result.proposed:
            raise ValueError(f"request {request.id!r}: {result.accepted} of {result.proposed} draft tokens accepted")


@dataclass(frozen=True, slots=True)
class Lookahead:
    """How far a step may draft: nodes and levels per decoding request."""

    drafts: int = 0
    levels: int = 0
    #: True: each request may use all draft nodes that fit in the step, and the nodes to verify are selected over all
    #: requests. False: each gets an even share of them.
    pooled: bool = False
    #: Most prompt tokens of the step; None: no limit.
    prompt_tokens: int | None = None
    #: Most decoding requests of the step, of those that run already; None: no limit.
    max_decoding: int | None = None

    @classmethod
    def deepest(cls, lookaheads: Iterable[Self]) -> Self:
        """The greatest number of nodes and of levels among these."""
        every = list(lookaheads)
        return cls(max((a.drafts for a in every), default=0), max((a.levels for a in every), default=0))


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages of one request to move: device page `device[i]` to or from host page `host[i]`."""

    request: Request
    device: tuple[int, ...]
    host: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step runs, which pages move before it, and which requests lost slots or pages for it.

    All offloads read the device as the previous step left it, then uploads write, then the step runs. So offloaded
    pages may be reused in the same step, and uploaded pages may be read by it; the host pages of an upload are reused
    in later plans only. Transfers happen even if nothing is scheduled.

    `preempted` requests lost their device pages, to the host or to be recomputed. `paused` ones lost their slot and
    keep their pages. A request that lost first the slot and then the pages is in both.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()
    paused: tuple[Request, ...] = ()
    #: KV transfers from the device to the host.
    offload: tuple[Transfer, ...] = ()
    #: KV transfers from the host to the device.
    upload: tuple[Transfer, ...] = ()
    #: Most draft nodes of all requests together.
    draft_nodes: int = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens that the step computes, drafts not counted."""
        return sum(s.count for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """New tokens of one `ScheduledRequest` (none for a chunk that does not reach the end), and whether it ended.

    Several tokens are accepted drafts and the bonus token: the KV of all but the last is committed after that of the
    known tokens. `accepted` may exceed their number if the request ended among them.
    """

    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    #: Draft tokens verified; 0 for plain decoding.
    proposed: int = 0
    #: Draft tokens accepted; 0 for plain decoding.
    accepted: int = 0
