"""Reasoning over HTTP: a fake engine recites answers of a model whose template has tags for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.live_server import CHAT, ask, started, stream
from helpers.serving import error_of

ANSWER = "<think>\nEins und zwei.\n</think>\n\nDrei"
PATH = "/v1/chat/completions"
ENDED = {"role": "assistant", "content": "</think>"}
WHOLE = {"messages": CHAT, "max_tokens": 200}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, str]]:
    with started(text=ANSWER) as (engine, url):
        engine.tokenizer.chat_template = "<think> </think>"
        yield engine, url


def test_a_whole_answer(served: tuple[Any, str]) -> None:
    got = ask(served[1], PATH, WHOLE)
    message = got["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Eins und zwei.", "Drei")
    assert message["reasoning"] == message["reasoning_content"]
    assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": ANSWER.index("\n\nDrei")}


def test_a_stream(served: tuple[Any, str]) -> None:
    deltas = [c["choices"][0]["delta"] for c in stream(served[1], PATH, WHOLE, usage=False)]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Eins und zwei."
    assert "".join(d.get("content", "") for d in deltas) == "Drei"


@pytest.mark.parametrize(
    ("changes", "reasoning", "content"),
    [
        ({"include_reasoning": False}, None, "Drei"),
        ({"separate_reasoning": False}, None, ANSWER),
        ({"max_tokens": 12}, "Eins", None),
        # The template's own tags turn reasoning off.
        ({"messages": [*CHAT, ENDED], "continue_final_message": True}, None, ANSWER),
    ],
)
def test_variants(served: tuple[Any, str], changes: Any, reasoning: str | None, content: str | None) -> None:
    message = ask(served[1], PATH, WHOLE | changes)["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_the_budget_reaches_the_engine(served: tuple[Any, str]) -> None:
    engine, url = served
    ask(url, PATH, WHOLE | {"thinking_token_budget": 7})
    params = engine.submitted[-1]
    assert (params.thinking_token_budget, params.constrained) == (7, True)
    assert (params.reasoning.begin, params.reasoning.opened) == ("<think>", False)


def test_a_model_without_reasoning_refuses_a_budget() -> None:
    with started() as (_, url):
        response = httpx.post(url + PATH, json=WHOLE | {"thinking_token_budget": 7})
        assert error_of(response)["param"] == "thinking_token_budget"
        assert "reasoning_content" not in ask(url, PATH, WHOLE)["choices"][0]["message"]


def test_it_can_be_turned_off() -> None:
    with started(text=ANSWER) as (engine, url):
        engine.tokenizer.chat_template, engine.config.reasoning_parser = "<think> </think>", "none"
        assert ask(url, PATH, WHOLE)["choices"][0]["message"]["content"] == ANSWER
