"""Keys, crowds, clients that leave, engines that fail or drain: the server answers, and lets go."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from helpers.fakes import FakeEngine, recited
from helpers.patience import PATIENCE
from helpers.serving import CHAT, COMPLETION, error_of, eventually, serving
from jaxspec.serve.app import ServerOptions


@pytest.fixture
def own() -> Iterator[FakeEngine]:
    """An engine of the test's own, to be broken."""
    engine = FakeEngine(step=0.002, max_num_seqs=2, max_queued_requests=2, max_model_len=100_000)
    engine.start()
    yield engine
    engine.shutdown()


LONG = {"prompt": "x", "max_tokens": 50_000}


def test_api_key(own: FakeEngine) -> None:
    with serving(own, ServerOptions(api_keys=("other", "geheim€"))) as url, httpx.Client(base_url=url) as http:
        assert http.get("/health").status_code == 200
        for wrong in (None, b"Bearer wrong", "Basic geheim€".encode()):
            response = http.get("/v1/models", headers={} if wrong is None else {b"authorization": wrong})
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
        assert http.get("/v1/models", headers={b"authorization": "Bearer geheim€".encode()}).status_code == 200
        for key in ("other", "geheim€"):  # each is a tenant of its own
            headers = {b"authorization": f"Bearer {key}".encode()}
            assert http.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
        assert len(set(own.tenants)) == 2 and all(re.fullmatch("[0-9a-f]{16}", tenant) for tenant in own.tenants)


def test_a_full_queue(own: FakeEngine) -> None:
    with serving(own) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http, ThreadPoolExecutor() as pool:
        answers = [pool.submit(http.post, "/v1/completions", json={"prompt": "x", "max_tokens": 200}) for _ in range(3)]
        eventually(lambda: own.stats().running + own.stats().waiting == 3)
        response = http.post("/v1/completions", json={"prompt": "x", "n": 2})
        assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        # Of the refused request's two outputs the one that was accepted is gone.
        assert own.stats().running + own.stats().waiting == 3
        assert [a.result().status_code for a in answers] == [200] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(own: FakeEngine, stream: bool) -> None:
    with serving(own) as url:
        address = url.removeprefix("http://").split(":")
        body = json.dumps(LONG | {"stream": stream, "n": 2}).encode()
        with socket.create_connection((address[0], int(address[1]))) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            sock.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            eventually(lambda: own.stats().running == 2)
            if stream:
                assert sock.recv(100).startswith(b"HTTP/1.1 200")
        eventually(lambda: own.stats().running == 0)
        assert len(own.cancelled) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue(own: FakeEngine, stream: bool) -> None:
    with serving(own) as url, httpx.Client(base_url=url) as http, ThreadPoolExecutor() as pool:
        running = pool.submit(
            http.post, "/v1/completions", json={"prompt": "x", "max_tokens": 400, "n": 2}, timeout=PATIENCE
        )
        eventually(lambda: own.stats().running == 2)
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=LONG | {"stream": stream}, timeout=0.1)
        eventually(lambda: own.stats().waiting == 0)
        assert len(own.cancelled) == 1
        assert running.result().status_code == 200


def test_the_engine_fails(own: FakeEngine) -> None:
    with serving(own) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http, ThreadPoolExecutor() as pool:
        whole = pool.submit(http.post, "/v1/completions", json=LONG)
        streamed = pool.submit(http.post, "/v1/completions", json=LONG | {"stream": True})
        eventually(lambda: own.stats().running == 2)
        waiting = pool.submit(http.post, "/v1/completions", json=LONG | {"stream": True})
        eventually(lambda: own.stats().waiting == 1)
        time.sleep(0.05)  # let the stream begin
        own.fail()
        for answer in (whole, waiting):  # nothing was sent yet: the status tells
            assert answer.result().status_code == 503
            assert error_of(answer.result())["code"] == "engine_dead"
        assert streamed.result().status_code == 200
        *_, last, done, _ = streamed.result().text.split("\n\n")
        assert "on fire" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        for response in (http.get("/health"), http.post("/v1/completions", json=COMPLETION)):
            assert response.status_code == 503
            assert "on fire" in error_of(response)["message"]
        assert http.get("/metrics").status_code == 200


def test_the_openai_client_sees_an_error_in_a_stream(own: FakeEngine) -> None:
    with serving(own) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(model="fake", messages=CHAT, stream=True)
        next(stream)
        own.fail()
        with pytest.raises(openai.APIError, match="on fire"):
            list(stream)


def test_draining(own: FakeEngine) -> None:
    with serving(own) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http, ThreadPoolExecutor() as pool:
        short = pool.submit(http.post, "/v1/completions", json={"prompt": "x", "max_tokens": 100})
        long = pool.submit(http.post, "/v1/completions", json=LONG)
        eventually(lambda: own.stats().running == 2)
        drained = pool.submit(own.shutdown, drain=True, timeout=1.0)
        eventually(lambda: own.health == "draining")
        for response in (http.get("/health"), http.post("/v1/completions", json=COMPLETION)):
            assert (response.status_code, error_of(response)["code"]) == (503, "draining")
        assert short.result().status_code == 200
        assert (long.result().status_code, error_of(long.result())["code"]) == (503, "aborted")
        drained.result()


def test_a_bug_is_answered_without_its_traceback(own: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own.tokenizer, "encode", None)
    with serving(own) as url:
        response = httpx.post(f"{url}/v1/completions", json=COMPLETION)
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "NoneType" not in response.text


def test_many_streams_some_cut() -> None:
    """64 at once, every fifth leaves half-way: the others get all of theirs, and nothing is left behind."""

    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        leaves = i % 5 == 0
        stream = await client.completions.create(
            model="fake", prompt=f"prompt {i}", max_tokens=50_000 if leaves else 200, seed=i, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if leaves and len(text) > 90:
                await stream.close()
                break
        return text

    async def crowd(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    engine = FakeEngine(step=0.002, max_model_len=100_000)
    engine.start()
    with serving(engine) as url:
        texts = asyncio.run(crowd(url))
        for i, text in enumerate(texts):
            if i % 5:
                assert text == recited(200, i)
        eventually(lambda: engine.stats().running + engine.stats().waiting == 0)
        assert len(engine.cancelled) == 13
    engine.shutdown()
