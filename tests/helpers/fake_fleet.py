"""Replicas in the event loop of a test: they recite tokens that depend on prompt and seed, and fail when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

from helpers.fakes import ByteTokenizer, as_tokenizer
from jaxspec.deploy.lengths import ExpectedLengths
from jaxspec.deploy.load import Load
from jaxspec.deploy.messages import Admitted, Facts, Message, Outputs, Refused, ReplicaLost, Submission
from jaxspec.deploy.remote_engine import RemoteEngine
from jaxspec.deploy.settings import RoutingSettings
from jaxspec.engine.metrics import EngineStats
from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.sched.config import SloSettings
from jaxspec.sched.routing import NoReplica, ReplicaReport, Routing

REPORT = ReplicaReport(0.0, 0, 0, 8, 0, 0.0, 0.001, 0.01)


def recited(prompt: tuple[int, ...], seed: int | None, count: int) -> list[int]:
    """The output of a request."""
    start = (seed or 0) % 1000
    return [(31 * sum(prompt) + start + 7 * i) % 256 for i in range(count)]


@dataclass
class FakeReplica:
    """`fails_at`: raises before the message with this number; `stops_at`: ends the stream there without a word.
    `hangs`: sends nothing more. `refusal`: what it answers. `skips`: sends the second token again."""

    fails_at: int | None = None
    stops_at: int | None = None
    hangs: bool = False
    refusal: Refused | None = None
    skips: bool = False
    dead: bool = False
    silent: bool = False
    submissions: list[Submission] = field(default_factory=list)
    #: Submissions that were closed before their end.
    closed: list[Submission] = field(default_factory=list)


class FakeFleet:
    """`replicas` by name; `listed`: those that may get requests."""

    def __init__(self, **replicas: FakeReplica) -> None:
        self.replicas = replicas
        self.listed = set(replicas)
        self._known = frozenset(replicas)

    async def names(self, fresh: bool = False) -> frozenset[str]:
        """As of the last call, as with Ray Serve: `fresh` waits until there is one."""
        while (fresh or not self._known) and not self.listed:
            await asyncio.sleep(0.001)
        if fresh or not self._known:
            self._called()
        return self._known

    def _called(self) -> None:
        """A call tells of the replicas that there are."""
        self._known = frozenset(self.listed) or self._known

    async def load(self, replica: str) -> Load:
        self._called()
        asked = self.replicas[replica]
        if asked.dead:
            raise ReplicaLost("it is dead", final=True)
        if asked.silent:
            await asyncio.Event().wait()
        return Load(REPORT, EngineStats(running=1, kv_pages=10, kv_usage=0.5, accepted_by_level=(2, 1)))

    async def generate(self, replica: str, submission: Submission) -> AsyncGenerator[Message, None]:
        self._called()
        asked, ended = self.replicas[replica], False
        asked.submissions.append(submission)
        try:
            async for message in self._messages(asked, submission):
                yield message
            ended = True
        finally:
            if not ended:
                asked.closed.append(submission)

    async def _messages(self, asked: FakeReplica, submission: Submission) -> AsyncGenerator[Message, None]:
        for number, message in enumerate(self._whole(asked, submission)):
            if asked.dead or number == asked.fails_at:
                raise ReplicaLost("it broke", final=asked.dead)
            if number == asked.stops_at:
                return
            if asked.hangs and number:
                await asyncio.Event().wait()
            yield message
            await asyncio.sleep(0)

    def _whole(self, asked: FakeReplica, submission: Submission) -> list[Message]:
        if asked.refusal is not None and (submission.resumed is None or asked.refusal.reason == "lost"):
            return [asked.refusal]
        params, before = submission.params, len(submission.resumed or ())
        tokens = recited(submission.prompt, params.seed, params.max_tokens or 0)
        metrics = RequestMetrics(5.0, 5.5, 6.0, 9.0, cached_tokens=3, output_tokens=len(tokens), preemptions=1)
        out: list[Message] = [Admitted()]
        for at in range(before, len(tokens)):
            last = at + 1 == len(tokens)
            delta = OutputDelta(
                submission.id, f"<{tokens[at]}>", (tokens[at],), finish_reason="length" if last else None,
                metrics=metrics if last or not at else None,
            )  # fmt: skip
            out.append(Outputs(at if not (asked.skips and at == 2) else 1, (delta,)))
        return out


class InTurn(Routing):
    """Always the first replica by name, so that tests know where a request goes."""

    def choose(self, request: Any, replicas: Any, now: float) -> Any:
        if not replicas:
            raise NoReplica("none")
        return min(replicas, key=lambda replica: replica.name)


def facts(**config: Any) -> Facts:
    given = dict(page_size=4, seed=1, slo=SloSettings(), max_queued_requests=8, max_num_seqs=8, draft=[]) | config
    known: Any = SimpleNamespace(**given)
    return Facts(["fake"], 512, 257, known, {})


def remote(fleet: FakeFleet, lengths: ExpectedLengths | None = None, **more: Any) -> RemoteEngine:
    """A remote engine of these replicas. `clock`, and settings of the routing."""
    clock = {"clock": more.pop("clock")} if "clock" in more else {}
    settings = RoutingSettings.model_validate({"report_every_s": 0.01, "patience_s": 5.0} | more)
    tokenizer = as_tokenizer(ByteTokenizer())
    return RemoteEngine(fleet, facts(), tokenizer, InTurn(None, Random(0)), settings, lengths, **clock)
