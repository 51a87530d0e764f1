"""The interface between a drafter and the `Speculator`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.trees.candidates import Candidates

#: A request's `SamplingInputs`. Only a drafter that samples its draft tokens reads them.
SamplingOf = Callable[[Request], Any]
#: A drafter's work that makes candidates, in `DrafterFailed`.
ROUND = "round"
#: Waits for the round and returns each request's candidates; None where the drafter has none for it.
Proposal = Callable[[], list[Candidates | None]]


class AheadProposal(NamedTuple):
    """Chains of drafts that the device may verify before the host has read them (`jaxspec.step.ahead`).

    on_device  the chains of all requests, for the step's program
    first      of each request, the index of its first node in `on_device`; None: it has no chain
    read       waits for the round
    seconds    estimated time of the round
    """

    on_device: Any
    first: Sequence[int | None]
    read: Proposal
    seconds: float


class DrafterFailed(RuntimeError):
    """A drafter raised an error, its cause. `drafter`: its index; `work`: what it did, `ROUND` or another word."""

    def __init__(self, drafter: int, name: str, work: str, error: Exception) -> None:
        super().__init__(f"drafter {name}, {work}: {error}")
        self.drafter, self.work = drafter, work


class Proposed(NamedTuple):
    """A request, the index of a drafter that drafted for it, the candidates, and the width of the beam."""

    scheduled: ScheduledRequest
    drafter: int
    candidates: Candidates
    width: int


class Drafter(Protocol):
    """Proposes candidates. It reads from a request's tokens which of its drafts were accepted."""

    @property
    def name(self) -> str: ...

    @property
    def widths(self) -> Sequence[int]:
        """Supported beam widths, ascending."""
        ...

    @property
    def ready(self) -> bool:
        """Whether its programs are compiled; before that, only its name may be used."""
        ...

    def uncached_tokens(self, request: Request) -> int:
        """Tokens of the request for which the drafter has no KV."""
        ...

    def serves(self, request: Request) -> bool:
        """Whether it may have candidates for the request at all."""
        ...

    @property
    def free(self) -> bool:
        """Whether a round takes next to no time and no device."""
        ...

    @property
    def own_device(self) -> bool:
        """Whether it runs on a device other than the target's, so that it can draft while the target verifies."""
        ...

    @property
    def reads_features(self) -> bool:
        """Whether it reads the target's features, which the target's last step wrote."""
        ...

    @property
    def drafts_ahead(self) -> bool:
        """Whether it has `propose_ahead`."""
        ...

    def prefetch_features(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Before the target's step starts: fetch from its device what later rounds of this step need."""
        ...

    def propose(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int, least: float = 0.0
    ) -> Proposal:
        """Start a draft round for these requests.

        `least`: a free drafter need not propose nodes that are less likely than this.
        """
        ...

    def propose_ahead(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, after: Mapping[str, int],
        before: Any,
    ) -> AheadProposal:  # fmt: skip
        """Start a draft round of chains for these requests while a step is under way whose tokens are not known.

        `after`: the place in that step of each request that it gives tokens, by id; `before`: that step's tokens on the
        device, None without such a step.
        """
        ...

    def got_tokens(self, request: Request, count: int) -> None:
        """The step under way gave the request this many tokens."""
        ...

    def precompute_kv(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> None:
        """Start to compute KV of these requests' uncached tokens while the target verifies.

        `prefetch_features` was called for them.
        """
        ...

    def ended(self, request: Request) -> None:
        """The request has finished or was cancelled."""
        ...

    def seconds(self, requests: int, uncached: int, levels: int, width: int) -> float:
        """Estimated seconds of a round for `requests` requests with `uncached` uncached tokens in total."""
        ...


class SharedDevice:
    """Base of drafters on the target's device: nothing to prefetch, no idle time to precompute KV in.

    By default all requests are served, and nothing is learned from requests that have ended.
    """

    free = False
    own_device = False
    reads_features = False
    drafts_ahead = False
    ready = True

    def serves(self, request: Request) -> bool:
        return True

    def prefetch_features(self, scheduled: Sequence[ScheduledRequest]) -> None:
        pass

    def precompute_kv(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass

    def got_tokens(self, request: Request, count: int) -> None:
        pass

    def propose_ahead(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, after: Mapping[str, int],
        before: Any,
    ) -> AheadProposal:  # fmt: skip
        raise NotImplementedError(f"{type(self).__name__} drafts from tokens that are known")


class FailedDrafter(SharedDevice):
    """Stands in for a drafter that has failed too often. It drafts for no request."""

    ready = False

    def __init__(self, name: str, widths: Sequence[int]) -> None:
        self.name, self.widths = name, widths

    def uncached_tokens(self, request: Request) -> int:
        return 0

    def serves(self, request: Request) -> bool:
        return False

    def propose(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int, least: float = 0.0
    ) -> Proposal:
        return lambda: [None] * len(scheduled)

    def seconds(self, requests: int, uncached: int, levels: int, width: int) -> float:
        return 0.0
