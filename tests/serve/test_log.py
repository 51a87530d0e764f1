"""Log lines: throughput, and requests."""

from __future__ import annotations

import asyncio
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from helpers.fakes import FakeEngine
from helpers.serving import eventually, serving
from jaxspec.engine.metrics import EngineStats
from jaxspec.serve.app import ServerOptions
from jaxspec.serve.log import ThroughputLog, throughput


def test_throughput() -> None:
    before = EngineStats(prompt_tokens=100, generation_tokens=50, draft_tokens=10, accepted_tokens=4, verifications=2)
    now = EngineStats(
        running=2, waiting=1, kv_usage=0.25, prompt_tokens=300, generation_tokens=150, prefix_queries=80,
        prefix_hits=20, draft_tokens=50, accepted_tokens=14, verifications=12,
    )  # fmt: skip
    assert throughput(before, now, 10.0) == (
        "prompt throughput: 20.0 tokens/s, generation throughput: 10.0 tokens/s, running: 2, waiting: 1, "
        "KV cache usage: 25.0%, prefix cache hit rate: 25.0%, acceptance rate: 25.0%, mean accepted length: 2.00"
    )


def test_attainment_of_the_requests_since_the_last_line() -> None:
    line = throughput(EngineStats(), EngineStats(generation_tokens=5), 10.0, [True, True, False])
    assert line is not None and line.endswith("SLO attainment: 66.7% of 3")


@pytest.mark.parametrize("now", [EngineStats(generation_tokens=50), EngineStats(generation_tokens=3)])
def test_an_idle_engine_has_no_throughput(now: EngineStats) -> None:
    """Also if its counters were reset."""
    assert throughput(EngineStats(generation_tokens=50), now, 10.0) is None


def test_requests_that_wait_are_no_idleness() -> None:
    line = throughput(EngineStats(), EngineStats(waiting=1), 10.0)
    assert line is not None and "waiting: 1" in line and "acceptance" not in line


def test_lines_come_while_requests_run(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each snapshot that differs from the one before."""
    caplog.set_level(logging.INFO, "jaxspec.serve.log")
    snapshots = [EngineStats(generation_tokens=n) for n in (0, 0, 5, 5, 9)]

    async def until_all_are_read() -> None:
        left = iter(snapshots)
        done = asyncio.Event()

        def stats() -> EngineStats:
            taken = next(left, None)
            if taken is None:
                done.set()
            return taken or snapshots[-1]

        engine: Any = SimpleNamespace(stats=stats, observers=[])
        task = asyncio.create_task(ThroughputLog(engine, interval=0.001).run())
        await done.wait()
        task.cancel()

    asyncio.run(until_all_are_read())
    assert [record.levelname for record in caplog.records] == ["INFO"] * 2


@pytest.fixture
def engine() -> Any:
    engine = FakeEngine(max_model_len=100_000)
    engine.start()
    yield engine
    engine.shutdown()


def test_requests(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxspec.serve.log")
    with serving(engine, ServerOptions(log_requests=True)) as url:
        id = httpx.post(f"{url}/v1/completions", json={"prompt": "xyz", "max_tokens": 9, "n": 2}).json()["id"]
    begun, ended = [[m for m in caplog.messages if ("max_tokens" in m) == begin] for begin in (True, False)]
    assert begun == [f"request {id}-{i}: prompt tokens: 3, max_tokens: 9" for i in (0, 1)]
    times = r"TTFT: \d+\.\d ms, E2E: \d+\.\d ms"
    for i, message in enumerate(sorted(ended)):
        assert re.fullmatch(rf"request {id}-{i}: finish reason: length, output tokens: 9, {times}", message)


def test_a_cancelled_request_is_logged(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxspec.serve.log")
    with serving(engine, ServerOptions(log_requests=True)) as url, ThreadPoolExecutor() as pool:
        body = {"prompt": "x", "max_tokens": 50_000}
        with pytest.raises(httpx.ReadTimeout):
            pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=0.1).result()
        eventually(lambda: any("finish reason: abort" in message for message in caplog.messages))


def test_requests_are_not_logged_by_default(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxspec.serve.log")
    with serving(engine) as url:
        httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).raise_for_status()
    assert not caplog.messages
