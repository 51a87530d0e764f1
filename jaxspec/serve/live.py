"""The route `/live`: snapshots of the engine as server-sent events, while a client watches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxspec.engine.live_snapshot import LiveRequest, LiveSnapshot, LiveTree
from jaxspec.serve.errors import ApiError
from jaxspec.serve.reply import KEEP_ALIVE, SSE_HEADERS

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

#: Most watchers at once.
MAX_WATCHERS = 16
#: Seconds without a snapshot after which a watcher looks whether the engine still lives.
_PATIENCE = 1.0
#: Seconds in which a client has to read a snapshot.
_SEND_TIMEOUT = 30.0
#: Facts about the server that every snapshot has.
Facts = Callable[[], dict[str, Any]]


class Watcher:
    """One client of `/live`. It gets the newest snapshot; those that it is too slow for are dropped."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        #: Whether the client has closed the connection.
        self.gone = False
        self._news = asyncio.Event()
        self._snapshot: LiveSnapshot | None = None

    def put(self, snapshot: LiveSnapshot) -> None:
        self._snapshot = snapshot
        self._news.set()

    async def next(self, timeout: float) -> LiveSnapshot | None:
        """The newest snapshot that it has not seen; None after `timeout` seconds, or if the client has gone."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout)
        self._news.clear()
        snapshot, self._snapshot = self._snapshot, None
        return snapshot

    async def listen(self, receive: Receive) -> None:
        """Notice that the client closes the connection."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._news.set()


class LiveFeed:
    """Passes snapshots from the engine's thread to the watchers. The engine takes none while there are no watchers.

    Used in the event loop's thread. `facts`: see `Facts`.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, facts: Facts) -> None:
        self.engine, self.facts = engine, facts
        self._loop = loop
        self._watchers: set[Watcher] = set()
        self._stop: Callable[[], None] | None = None
        self._latest: LiveSnapshot | None = None  # written by the engine's thread
        self._awake = False

    @contextlib.contextmanager
    def watching(self, tenant: str) -> Iterator[Watcher]:
        """A watcher for as long as the context lasts. Raises `ApiError` (429) if there are too many."""
        if len(self._watchers) >= MAX_WATCHERS:
            message = f"{MAX_WATCHERS} clients watch already; close another live view"
            raise ApiError(429, message, code="too_many_watchers", headers={"Retry-After": "5"})
        watcher = Watcher(tenant)
        self._watchers.add(watcher)
        if self._stop is None:
            self._stop = self.engine.watch(self._on_snapshot)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._stop is not None:
                self._stop()
                self._stop = self._latest = None

    def _on_snapshot(self, snapshot: LiveSnapshot) -> None:
        """Called in the engine's thread; never blocks, and at most one wake-up of the event loop is pending."""
        self._latest = snapshot
        if not self._awake:
            self._awake = True
            with contextlib.suppress(RuntimeError):  # the loop is closed because the server has stopped
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._awake = False
        if (snapshot := self._latest) is not None:
            for watcher in self._watchers:
                watcher.put(snapshot)


class LiveReply(Response):
    """The stream of one watcher. It ends when the client goes, reads nothing for too long, or the engine is dead."""

    def __init__(self, feed: LiveFeed, tenant: str, keep_alive: float) -> None:
        super().__init__()
        self._feed, self._tenant, self._keep_alive = feed, tenant, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.watching(self._tenant) as watcher:
            listening = asyncio.create_task(watcher.listen(receive))
            try:
                await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
                with contextlib.suppress(TimeoutError):
                    await self._events(watcher, send)
            finally:
                listening.cancel()

    async def _events(self, watcher: Watcher, send: Send) -> None:
        """Raises `TimeoutError` if the client reads too slowly."""
        clock = asyncio.get_running_loop().time
        due = clock() + self._keep_alive
        while not watcher.gone and self._feed.engine.health != "dead":
            snapshot = await watcher.next(_PATIENCE)
            if snapshot is not None:
                body = b"data: " + orjson.dumps(as_json(snapshot, watcher.tenant) | self._feed.facts()) + b"\n\n"
            elif self._keep_alive and clock() >= due:
                body = KEEP_ALIVE
            else:
                continue
            message = {"type": "http.response.body", "body": body, "more_body": True}
            await asyncio.wait_for(send(message), _SEND_TIMEOUT)
            due = clock() + self._keep_alive
        await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), _SEND_TIMEOUT)


def as_json(snapshot: LiveSnapshot, tenant: str) -> dict[str, Any]:
    """The snapshot as a watcher of `tenant` may see it: token texts only of the tenant's own requests."""
    tree = snapshot.trees.get(tenant) or next(reversed(snapshot.trees.values()), None)
    return {
        "time": round(snapshot.time, 3),
        "policy": snapshot.policy,
        "rule": snapshot.rule,
        "drafters": snapshot.drafters,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "paused": snapshot.paused,
        "swapped": snapshot.swapped,
        "slots": snapshot.slots,
        "kv_usage": round(snapshot.kv_usage, 4),
        "kv_pages": snapshot.kv_pages,
        "tokens_per_second": round(snapshot.tokens_per_second, 1),
        "acceptance_rate": _rounded(snapshot.acceptance_rate),
        "mean_accepted_length": _rounded(snapshot.mean_accepted_length),
        "requests": [_request(r, tenant) for r in snapshot.requests],
        "ended": [
            {
                "id": end.id,
                "output_tokens": end.output_tokens,
                "finish_reason": end.finish_reason,
                "took_ms": round(1000 * end.took),
                "age_ms": round(1000 * (snapshot.time - end.time)),
            }
            for end in snapshot.ended
        ],
        "tree": None if tree is None else _tree(tree, tenant),
    }


def _request(request: LiveRequest, tenant: str) -> dict[str, Any]:
    return {
        "id": request.id,
        "own": request.tenant == tenant,
        "state": request.state,
        "reason": request.reason,
        "place": request.place,
        "age_ms": round(1000 * request.age),
        "prompt_tokens": request.prompt_tokens,
        "prompt_done": request.prompt_done,
        "output_tokens": request.output_tokens,
        "max_tokens": request.max_tokens,
        "predicted_tokens": None if request.predicted is None else round(request.predicted),
        "acceptance_rate": _rounded(request.accepted / request.proposed if request.proposed else None),
        "preemptions": request.preemptions,
        "tpot_ms": _milliseconds(request.tpot),
        "ttft_ms": _milliseconds(request.ttft),
        "slack_of": request.slack_of,
        "slack_ms": _milliseconds(request.slack),
    }


def _tree(tree: LiveTree, tenant: str) -> dict[str, Any]:
    own = tree.tenant == tenant
    nodes = [
        {"text": n.text if own else None, "parent": n.parent, "depth": n.depth, "accepted": n.accepted}
        | {"drafters": n.drafters}
        for n in tree.nodes
    ]
    return {
        "id": tree.request_id,
        "own": own,
        "age_ms": round(1000 * tree.age),
        "proposed": tree.proposed,
        "accepted": tree.accepted,
        "nodes": nodes,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
