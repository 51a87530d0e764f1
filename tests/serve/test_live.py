"""The route `/live`: what watchers see, whose text they see, how many there may be, and what nobody looking costs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from helpers.fakes import FakeEngine
from helpers.live import live_events, live_request, live_snapshot, live_tree
from helpers.patience import PATIENCE
from helpers.serving import error_of, eventually, serving
from jaxspec.engine.live_snapshot import LiveEnd
from jaxspec.serve.app import ServerOptions
from jaxspec.serve.live import MAX_WATCHERS, LiveFeed

KEYS = ("one", "two")


@pytest.fixture
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    engine.start()
    with serving(engine, ServerOptions(preset="sjf", keep_alive=0.05)) as url:
        yield engine, url
    engine.shutdown()


def tell(engine: FakeEngine, *snapshots: Any) -> None:
    """Take these snapshots as the engine's thread does."""
    for snapshot in snapshots:
        for on_snapshot in list(engine.watchers):
            on_snapshot(snapshot)


def test_pages_of_other_sites_see_nothing(served: tuple[FakeEngine, str]) -> None:
    """Without keys, any page that somebody opens could read everyone's tokens."""
    _, url = served
    refused = httpx.get(f"{url}/live", headers={"Origin": "https://elsewhere.example"})
    assert refused.status_code == 403 and error_of(refused)["code"] == "foreign_origin"
    with httpx.stream("GET", f"{url}/live", headers={"Origin": url}, timeout=PATIENCE) as own:
        assert own.status_code == 200


def test_a_watcher_sees_the_engine(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    with httpx.stream("GET", f"{url}/live", timeout=PATIENCE) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        eventually(lambda: bool(engine.watchers))
        ended = (LiveEnd(0.5, "s", 7, "stop", 1.25),)
        tell(engine, live_snapshot(requests=(live_request(),), ended=ended, trees={"": live_tree()}))
        seen = next(live_events(stream))
    assert {key: seen[key] for key in ("model", "preset", "policy", "slo", "kv_usage", "tokens_per_second")} == {
        "model": "fake", "preset": "sjf", "policy": {"order": "sjf"}, "slo": {"met": 0, "missed": 0}, "kv_usage": 0.25,
        "tokens_per_second": 33.3,
    }  # fmt: skip
    (request,) = seen["requests"]
    assert (request["own"], request["state"], request["place"]) == (True, "waiting", 0)
    assert (request["tpot_ms"], request["slack_of"], request["slack_ms"]) == (40.0, "ttft", -1000.0)
    (end,) = seen["ended"]
    assert end == {"id": "s", "output_tokens": 7, "finish_reason": "stop", "took_ms": 1250, "age_ms": 500}
    assert "tenant" not in request and request["predicted_tokens"] == 12
    assert [node["text"] for node in seen["tree"]["nodes"]] == ["secret", " text", " no", "!"]
    assert seen["tree"]["nodes"][2]["drafters"] == ["suffix", "eagle"]


def test_the_engine_takes_snapshots_only_while_somebody_watches(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    assert not engine.watchers
    with httpx.stream("GET", f"{url}/live") as one, httpx.stream("GET", f"{url}/live") as two:
        assert one.status_code == two.status_code == 200
        eventually(lambda: len(engine.watchers) == 1)  # one feed for all watchers
    eventually(lambda: not engine.watchers)


def test_attainment_counts_requests(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    for tpot in (1000.0, 0.001):
        body = {"prompt": "x", "max_tokens": 4, "slo": {"tpot_ms": tpot}}
        httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status()
    httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE).raise_for_status()
    with httpx.stream("GET", f"{url}/live", timeout=PATIENCE) as stream:
        eventually(lambda: bool(engine.watchers))
        tell(engine, live_snapshot())
        assert next(live_events(stream))["slo"] == {"met": 1, "missed": 1}


def test_a_silent_engine_is_kept_alive_and_a_dead_one_ends_the_stream(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    with httpx.stream("GET", f"{url}/live", timeout=PATIENCE) as stream:
        lines = stream.iter_lines()
        assert next(lines) == ": keep-alive"
        engine.fail()
        assert not [line for line in lines if line.startswith("data")]
    dead = httpx.get(f"{url}/live", timeout=PATIENCE)
    assert dead.status_code == 503 and error_of(dead)["code"] == "engine_dead"


def test_too_many_watchers(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    with ExitStack() as stack:
        for _ in range(MAX_WATCHERS):
            assert stack.enter_context(httpx.stream("GET", f"{url}/live", timeout=PATIENCE)).status_code == 200
        refused = httpx.get(f"{url}/live", timeout=PATIENCE)
        assert refused.status_code == 429 and error_of(refused)["code"] == "too_many_watchers"
        assert "Retry-After" in refused.headers
    eventually(lambda: not engine.watchers)
    with httpx.stream("GET", f"{url}/live", timeout=PATIENCE) as again:
        assert again.status_code == 200


def test_texts_are_for_their_own_tenant_only() -> None:
    engine = FakeEngine()
    engine.start()
    try:
        with serving(engine, ServerOptions(api_keys=KEYS)) as url, ExitStack() as stack:
            assert httpx.get(f"{url}/live").status_code == 401
            for key in KEYS:  # the fake remembers whose requests it got
                headers = {"Authorization": f"Bearer {key}"}
                httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=headers).raise_for_status()
            owner, other = engine.tenants
            streams = [
                live_events(stack.enter_context(httpx.stream("GET", f"{url}/live", headers=headers, timeout=PATIENCE)))
                for headers in ({"Authorization": f"Bearer {key}"} for key in KEYS)
            ]
            eventually(lambda: len(engine.watchers) == 1)
            requests = live_request("a", owner), live_request("b", other)
            tell(engine, live_snapshot(requests=requests, trees={owner: live_tree("a", owner)}))
            mine, theirs = map(next, streams)
            assert [r["own"] for r in mine["requests"]] == [True, False]
            assert [r["own"] for r in theirs["requests"]] == [False, True]
            assert (mine["tree"]["own"], mine["tree"]["nodes"][0]["text"]) == (True, "secret")
            assert (theirs["tree"]["own"], {node["text"] for node in theirs["tree"]["nodes"]}) == (False, {None})
            tell(engine, live_snapshot(2.0, trees={other: live_tree("b", other), owner: live_tree("a", owner)}))
            assert [next(stream)["tree"]["id"] for stream in streams] == ["a", "b"]  # its own, not the newest
            assert all(owner not in str(seen) and other not in str(seen) for seen in (mine, theirs))
    finally:
        engine.shutdown()


def test_a_slow_watcher_misses_snapshots_and_blocks_nobody() -> None:
    async def run() -> None:
        engine: Any = FakeEngine()
        feed = LiveFeed(engine, asyncio.get_running_loop(), dict)
        with feed.watching("") as slow:
            for time in (1.0, 2.0, 3.0):
                tell(engine, live_snapshot(time))  # returns at once, although nobody reads
            seen = await slow.next(PATIENCE)
            assert seen is not None and seen.time == 3.0
            assert await slow.next(0.01) is None
        assert not engine.watchers

    asyncio.run(run())


def test_without_the_page() -> None:
    engine = FakeEngine()
    engine.start()
    try:
        with serving(engine, ServerOptions(ui=False)) as url:
            for path in ("/", "/ui/style.css", "/live"):
                refused = httpx.get(url + path)
                assert refused.status_code == 404 and error_of(refused)["code"] == "unknown_url"
    finally:
        engine.shutdown()
