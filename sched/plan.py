"""What the scheduler asks the engine to run in one step, and what the engine answers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxspec.sched.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Compute `count` known tokens of `request` from position `start`. Pages for all of them are allocated.

    The derived properties hold until the plan is answered by `update`, which appends to the request's tokens.
    """

    request: Request
    start: int
    count: int
    #: Most draft nodes that may follow the last known token, and most levels of them; pages and budget are set aside.
    drafts: int = 0
    levels: int = 0

    @property
    def samples(self) -> bool:
        """Whether the step's choice at the last token is a new token of the request."""
        return self.start + self.count == len(self.request.tokens)

    @property
    def reads_all(self) -> bool:
        """Whether the logits of every position are read, not of the last only: those of a chunk that begins in a prompt
        whose log-probabilities are asked for (after a preemption it may go on into the output)."""
        return self.request.prompt_logprobs and self.start < self.request.prompt_len

    @property
    def logit_rows(self) -> int:
        """How many positions' logits are read: all, or the last one's if it samples."""
        return self.count if self.reads_all else int(self.samples)

    @property
    def recomputes(self) -> int:
        """How many of the tokens had been computed before the request lost its pages."""
        lost = self.request.recompute_until
        return 0 if lost is None else max(0, min(self.start + self.count, lost) - self.start)

    @property
    def last_row(self) -> int:
        """Where the last position's choice stands among those of this work."""
        return self.count - 1 if self.reads_all else 0

    def check(self, result: RequestResult) -> None:
        """Raise `ValueError` if this cannot have come of it."""
        request, new = self.request, result.tokens
        if result.finish_reason is None:
            if bool(new) != self.samples:
                raise ValueError(f"request {request.id!r}: {len(new)} tokens from work that samples: {self.samples}")
            if request.output_len + len(new) >= request.max_tokens:
                raise ValueError(f"request {request.id!r} goes on after its max_tokens of {request.max_tokens}")
        if not 0 <= result.accepted <= result.proposed:
            raise ValueError(f"request {request.id!r}: {result.accepted} of {result.proposed} draft tokens accepted")


@dataclass(frozen=True, slots=True)
class Lookahead:
    """How far a step may draft: nodes and levels for each decoding request."""

    drafts: int = 0
    levels: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """Whole pages of one request to be moved, device page `device[i]` from or to host page `host[i]`."""

    request: Request
    device: tuple[int, ...]
    host: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, what is moved before it, and who had to make room for it.

    First all offloads read the device as the step before left it, then uploads write, then the step runs. So pages that
    are offloaded may be others' in this very step, and uploaded ones may be read by it; host pages of an upload are
    offloaded to in later plans only. Transfers are carried out where there is no work, too.

    `preempted` requests lost their device pages, to the host or for good (then they will be recomputed); `paused` ones
    lost their seat to others that go before them and keep their pages. One that lost first the seat and then the pages
    is in both.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()
    paused: tuple[Request, ...] = ()
    #: Device pages to host pages, and host pages to device pages.
    offload: tuple[Transfer, ...] = ()
    upload: tuple[Transfer, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(w.count for w in self.scheduled)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """New tokens of one `ScheduledRequest` (none for a chunk that does not reach the end), and whether it ended.

    Several tokens are accepted drafts and one more: the KV of all but the last is committed behind the known tokens'.
    `accepted` may be more than their number, when the request ends among them.
    """

    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    #: Draft tokens that were verified, and those accepted; a round without any is plain decoding.
    proposed: int = 0
    accepted: int = 0
