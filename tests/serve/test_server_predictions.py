"""What the server tells of predicted lengths: to those who ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.live_server import CHAT, REQUESTS, ask, started, stream
from helpers.patience import PATIENCE

ASKED = {"return_predicted_tokens": True}


@pytest.fixture(scope="module")
def predicting() -> Iterator[str]:
    with started(predicted=7.4) as (_, url):
        yield url


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    with started() as (_, url):
        yield url


@pytest.mark.parametrize(("path", "body", "_"), REQUESTS)
def test_it_is_reported_on_request(predicting: str, path: str, body: dict[str, Any], _: Any) -> None:
    answer = ask(predicting, path, body | ASKED)
    total, median, high = {7: (7, 6, 15), 28: (30, None, None)}[answer["usage"]["completion_tokens"]]
    assert answer["metrics"] == {
        "predicted_tokens": total, "predicted_tokens_p50": median, "predicted_tokens_p90": high,
    }  # fmt: skip
    *others, last = stream(predicting, path, body | ASKED, usage=True)
    assert last["metrics"] == answer["metrics"]
    assert not any("metrics" in chunk for chunk in others)
    for without in (body, body | {"return_predicted_tokens": False}):
        assert "metrics" not in ask(predicting, path, without)


def test_without_a_prediction(silent: str) -> None:
    metrics = ask(silent, "/v1/completions", {"prompt": "x", **ASKED})["metrics"]
    assert metrics == dict.fromkeys(("predicted_tokens", "predicted_tokens_p50", "predicted_tokens_p90"))


def test_it_is_reported_together_with_speculation() -> None:
    with started(predicted=7.4, draft=["ngram"]) as (_, url):
        metrics = ask(url, "/v1/chat/completions", {"messages": CHAT, **ASKED})["metrics"]
    assert metrics["predicted_tokens"] == 7 and metrics["speculative_decoding"]["proposed"] == 18


def test_the_field_is_a_truth_value(predicting: str) -> None:
    body = {"prompt": "x", "return_predicted_tokens": "yes"}
    answer = httpx.post(predicting + "/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "return_predicted_tokens"
