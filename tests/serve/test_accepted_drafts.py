"""`return_accepted_drafts`: a chunk for each token, which says whether it was an accepted draft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.fakes import recited
from helpers.live_server import CHAT, started, stream
from helpers.serving import error_of

ROUTES = [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": CHAT})]
ASKED = {"return_accepted_drafts": True, "max_tokens": 24}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with started(draft=["suffix"]) as (_, url):
        yield url


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_token_has_a_chunk(url: str, path: str, body: dict[str, Any]) -> None:
    choices = [c for event in stream(url, path, body | ASKED, usage=True) for c in event["choices"]]
    tokens = [c for c in choices if "draft" in c]
    assert [c["draft"] for c in tokens] == [i % 2 == 1 for i in range(24)]  # bytes of a character that give no text too
    text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
    assert text == recited(24) and any(ord(char) > 127 for char in text)
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_only_who_asks_gets_them(url: str, path: str, body: dict[str, Any]) -> None:
    choices = [c for event in stream(url, path, body, usage=False) for c in event["choices"]]
    assert not any("draft" in c for c in choices)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_it_needs_a_stream(url: str, path: str, body: dict[str, Any]) -> None:
    refused = httpx.post(url + path, json=body | ASKED)
    assert refused.status_code == 400 and error_of(refused)["param"] == "return_accepted_drafts"
