"""An answer says when its KV went through INT8, whether or not it was asked for usage."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.live_server import REQUESTS, ask, started, stream


@pytest.mark.parametrize(("path", "body", "_"), REQUESTS)
def test_quantised_answers_say_so(path: str, body: dict[str, Any], _: Any) -> None:
    with started(kv_quantized=True) as (_engine, url):
        assert ask(url, path, body)["metrics"] == {"kv_quantized": True}
        *others, last = stream(url, path, body, usage=True)
        assert last["metrics"] == {"kv_quantized": True}
        assert not any("metrics" in chunk for chunk in others)
        told = [chunk for chunk in stream(url, path, body, usage=False) if "metrics" in chunk]
        assert told and all(chunk["choices"][0]["finish_reason"] for chunk in told)


def test_exact_answers_say_nothing() -> None:
    path, body, _ = REQUESTS[0]
    with started() as (_engine, url):
        assert "metrics" not in ask(url, path, body)
        assert not any("metrics" in chunk for chunk in stream(url, path, body, usage=False))
