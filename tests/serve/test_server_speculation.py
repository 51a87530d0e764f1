"""What the server tells of speculation: in its answers, in its streams, and to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from helpers.live_server import CHAT, ONE, REQUESTS, ask, metrics, started, stream
from helpers.patience import PATIENCE
from helpers.serving import eventually
from jaxspec.outputs import SpeculationCounts


@pytest.fixture(scope="module")
def drafting() -> Iterator[str]:
    with started(draft=["ngram"]) as (_, url):
        yield url


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with started() as (_, url):
        yield url


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body", "expected"), REQUESTS)
def test_answers_say_what_was_drafted(drafting: str, path: str, body: dict[str, Any], expected: Any) -> None:
    assert ask(drafting, path, body)["metrics"] == {"speculative_decoding": expected}


@pytest.mark.parametrize(("path", "body", "expected"), REQUESTS)
def test_the_chunk_with_the_usage_says_it(drafting: str, path: str, body: dict[str, Any], expected: Any) -> None:
    *others, last = stream(drafting, path, body, usage=True)
    assert last["usage"]["completion_tokens"] in (7, 28)
    assert last["metrics"] == {"speculative_decoding": expected}
    assert not any("metrics" in chunk for chunk in others)
    assert not any("metrics" in chunk for chunk in stream(drafting, path, body, usage=False))


def test_an_answer_that_needed_no_draft(drafting: str) -> None:
    nothing = {"proposed": 0, "accepted": 0, "accepted_per_position": [], "mean_accepted_length": 1.0}
    for body in ({"max_tokens": 1}, {"max_tokens": 0, "echo": True, "logprobs": 0}):
        answer = ask(drafting, "/v1/completions", {"prompt": "x", **body})
        assert answer["metrics"] == {"speculative_decoding": nothing}


@pytest.mark.parametrize(("path", "body", "_"), REQUESTS)
def test_without_a_drafter_there_are_no_such_keys(plain: str, path: str, body: dict[str, Any], _: Any) -> None:
    assert "metrics" not in ask(plain, path, body)
    assert not any("metrics" in chunk for chunk in stream(plain, path, body, usage=True))


def test_openais_client_passes_it_on(drafting: str) -> None:
    with openai.OpenAI(base_url=f"{drafting}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="fake", messages=CHAT, max_tokens=7)
    assert (answer.model_extra or {})["metrics"] == {"speculative_decoding": ONE}


def test_counts_of_sequences_are_merged_level_by_level() -> None:
    total = SpeculationCounts()
    for accepted in ([1], [3, 0], []):
        own = SpeculationCounts()
        for number in accepted:
            own.add(4, number)
        total.merge(own)
    assert total == SpeculationCounts(proposed=12, accepted=4, verifications=3, by_level=[2, 1, 1])
    assert total.mean_accepted_length == pytest.approx(7 / 3)


# -- Prometheus --------------------------------------------------------------------------------------------------------


NAMES = ("drafts", "draft_tokens", "accepted_tokens")


def test_prometheus_counts_drafts() -> None:
    with started(draft=["ngram"]) as (_, url):
        assert [metrics(url)[f"spec_decode_num_{name}_total{{}}"] for name in NAMES] == [0, 0, 0]
        ask(url, "/v1/completions", {"prompt": "x", "n": 4})
        after = metrics(url)
        assert [after[f"spec_decode_num_{name}_total{{}}"] for name in NAMES] == [24, 72, 24]
        by_level = {name: value for name, value in after.items() if "per_pos" in name}
        assert by_level == {
            f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}': count for i, count in enumerate((16, 8))
        }


def test_prometheus_without_a_drafter(plain: str) -> None:
    ask(plain, "/v1/completions", {"prompt": "x"})
    assert [metrics(plain)[f"spec_decode_num_{name}_total{{}}"] for name in NAMES] == [0, 0, 0]
    assert not any("per_pos" in name for name in metrics(plain))


def test_the_time_to_the_first_token_shows_while_its_request_runs() -> None:
    with started(max_model_len=100_000) as (engine, url):
        body = {"prompt": "x", "max_tokens": 50_000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            events = answer.iter_lines()  # kept: the connection ends with it
            next(events)
            during = metrics(url)
            assert engine.stats().running == 1
        assert during["time_to_first_token_seconds_count{}"] == 1
        assert during["e2e_request_latency_seconds_count{}"] == 0
        eventually(lambda: metrics(url)['request_success_total{finished_reason="abort"}'] == 1)
        assert metrics(url)["time_to_first_token_seconds_count{}"] == 1
