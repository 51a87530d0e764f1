"""One request of a remote engine, over all the replicas that have served a part of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxspec.deploy.messages import Outputs, ReplicaLost, Submission
from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.routing import RoutedRequest, prefix_keys
from jaxspec.sched.slo import Slo


class RemoteRequest:
    """What its client has of it, and what another replica needs to go on with it.

    `params` have a seed. `on_end` is called before its last delta. Times are seconds on the ingress's clock.
    """

    def __init__(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        on_output: Callable[[OutputDelta], None],
        on_end: Callable[[RemoteRequest, str], None],
        *,
        max_tokens: int,
        page_size: int,
        arrival: float,
        priority: int = 0,
        slo: Slo,
        predict: bool = False,
        tenant: str = "",
    ) -> None:
        self.id, self.prompt, self._on_output, self._on_end = id, tuple(prompt), on_output, on_end
        self._first = Submission(id, self.prompt, params, priority, slo, predict, tenant)
        self._page_keys = prefix_keys(self.prompt, page_size)
        self.max_tokens = max_tokens
        self.metrics = RequestMetrics(arrival, prompt_tokens=len(prompt), max_tokens=max_tokens, slo=slo)
        #: Output tokens that the client has.
        self.tokens: list[int] = []
        #: Output tokens that it is expected to have; None: unknown.
        self.expected: float | None = None
        #: Whether a replica has taken it: then no other may refuse it.
        self.admitted = False
        #: As that of the last delta; None: it has not ended.
        self.finish_reason: str | None = None
        #: The replica that serves it, and when that was last heard of; the task that reads from it.
        self.replica: str | None = None
        self.heard = arrival
        self.reading: asyncio.Task[object] | None = None
        #: Replicas that it must not go to: they refused it, for the reasons in `refused_by`, or were lost with it.
        self.refused_by: dict[str, Exception] = {}
        self.lost_with: set[str] = set()
        #: How often it was sent to a replica, and how often that was lost.
        self.sent = self.lost = 0
        #: When its latest tokens came.
        self._latest: float | None = None

    @property
    def ended(self) -> bool:
        """Whether its client has the last delta."""
        return self.finish_reason is not None

    @property
    def excluded(self) -> set[str]:
        """Replicas that it must not go to."""
        return self.lost_with | self.refused_by.keys()

    def routed(self) -> RoutedRequest:
        """As the routing policy sees it: the tokens so far are part of what must be computed."""
        known = len(self.tokens)
        expected = None if self.expected is None else max(1.0, self.expected - known)
        return RoutedRequest(
            self.id, len(self.prompt) + known, self.max_tokens - known, self._page_keys, expected, self._first.slo,
            self._first.tenant,
        )  # fmt: skip

    def submission(self, now: float) -> Submission:
        """What a replica is asked for, under an id of its own: a replica may get the request a second time."""
        self.sent += 1
        resumed = tuple(self.tokens) if self.admitted else None
        waited = now - (self.metrics.arrival if self._latest is None else self._latest)
        return replace(self._first, id=f"{self.id}/{self.sent}", resumed=resumed, waited=waited)

    def take(self, outputs: Outputs, now: float) -> list[tuple[int, float | None]]:
        """Pass on deltas of a replica. -> of each with tokens: their number, and the seconds since those before.

        Raises `ReplicaLost` if they do not follow those that the client has.
        """
        if outputs.offset != len(self.tokens):
            raise ReplicaLost(f"output from token {outputs.offset} on, with {len(self.tokens)} so far")
        taken: list[tuple[int, float | None]] = []
        for delta in outputs.deltas:
            self.tokens += delta.token_ids
            if delta.metrics is not None:
                self._learn(delta.metrics)
            if count := len(delta.token_ids):
                if self._latest is None:
                    self.metrics.first_token = now
                taken.append((count, None if self._latest is None else now - self._latest))
                self._latest = now
            self.metrics.output_tokens = len(self.tokens)
            if delta.finish_reason is not None:
                self._finish(delta.finish_reason, now)
            self._on_output(replace(delta, request_id=self.id, metrics=self.metrics))
        return taken

    def _learn(self, theirs: RequestMetrics) -> None:
        """Take over what only the replica knows. Its clock is another, so only its durations count."""
        m, first = self.metrics, self._latest is None
        if first:  # a resumed request finds its own output in the cache
            m.cached_tokens = theirs.cached_tokens
            m.predicted_tokens, m.predicted_quantiles = theirs.predicted_tokens, theirs.predicted_quantiles
            if theirs.first_scheduled is not None:
                m.first_scheduled = m.arrival + theirs.first_scheduled - theirs.arrival
        m.kv_quantized = m.kv_quantized or theirs.kv_quantized
        if theirs.finished is not None:
            m.preemptions += theirs.preemptions
            m.speculation = theirs.speculation
            if m.predicted_tokens is None:
                m.predicted_tokens, m.predicted_quantiles = theirs.predicted_tokens, theirs.predicted_quantiles

    def end(self, reason: str, now: float, error: str | None = None, refused: Exception | None = None) -> None:
        """End it without a replica. `refused`: what a local engine would have raised."""
        if not self.ended:
            self._finish(reason, now)
            message = error or (None if refused is None else str(refused))
            last = OutputDelta(self.id, "", (), finish_reason=reason, metrics=self.metrics, error=message)
            self._on_output(replace(last, refused=refused))

    def _finish(self, reason: str, now: float) -> None:
        self.finish_reason, self.metrics.finished = reason, now
        self._on_end(self, reason)
