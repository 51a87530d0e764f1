"""SLOs in the server: how they are read, and how it reports attainment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.fakes import FakeEngine
from helpers.live_server import REQUESTS, ask, metrics, started, stream
from helpers.patience import PATIENCE
from jaxspec.sched.config import LatencySlo, SloSettings
from jaxspec.sched.slo import NONE, Slo

SETTINGS = SloSettings(
    categories={"chat": LatencySlo(tpot_ms=60_000), "code": LatencySlo(tpot_ms=20_000, ttft_ms=90_000)}
)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    with started(slo=SETTINGS) as (engine, url):
        yield engine, url


@pytest.mark.parametrize(
    ("slo", "targets"),
    [
        (None, NONE),
        ({}, NONE),
        ({"tpot_ms": None}, NONE),
        ({"tpot_ms": 25.5}, Slo(tpot=0.0255)),
        ({"category": "chat"}, Slo(tpot=60.0)),
        ({"category": "code", "tpot_ms": 30_000}, Slo(30.0, 90.0)),
        ({"category": "chat", "ttft_ms": 100}, Slo(60.0, 0.1)),
    ],
)
@pytest.mark.parametrize(("path", "body"), [REQUESTS[0][:2], REQUESTS[2][:2]])
def test_slos_reach_the_engine(served: tuple[FakeEngine, str], path: str, body: Any, slo: Any, targets: Slo) -> None:
    engine, url = served
    ask(url, path, body | {"slo": slo})
    assert engine.slos[-1] == targets


def test_the_default_slo_applies_to_requests_that_name_none() -> None:
    with started(slo=SETTINGS.model_copy(update={"tpot_ms": 50_000})) as (engine, url):
        told = ask(url, "/v1/completions", {"prompt": "x"})["metrics"]["slo"]
        assert (told["tpot_ms"], told["tpot_attained"]) == (50_000, True)
        ask(url, "/v1/completions", {"prompt": "x", "slo": {"ttft_ms": 5}})
        ask(url, "/v1/completions", {"prompt": "x", "slo": {"category": "code"}})
    assert engine.slos == [Slo(50.0), Slo(50.0, 0.005), Slo(20.0, 90.0)]


def test_an_unknown_category_is_refused_with_the_known_ones(served: tuple[FakeEngine, str]) -> None:
    body = {"prompt": "x", "slo": {"category": "prose"}}
    answer = httpx.post(served[1] + "/v1/completions", json=body, timeout=PATIENCE)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "slo.category", "invalid_value")
    assert error["message"] == "slo.category: 'prose' is unknown; known: chat, code"


@pytest.mark.parametrize(("path", "body", "_"), REQUESTS)
def test_answers_say_how_they_stood(served: tuple[FakeEngine, str], path: str, body: Any, _: Any) -> None:
    url = served[1]
    ask_for = body | {"slo": {"tpot_ms": 60_000, "ttft_ms": 0.001}}
    told = ask(url, path, ask_for)["metrics"]["slo"]
    assert told.keys() == {
        "tpot_ms", "ttft_ms", "tpot_attained", "ttft_attained", "tpot_slack_ms", "ttft_slack_ms"
    }  # fmt: skip
    assert (told["tpot_ms"], told["tpot_attained"]) == (60_000, True)
    assert (told["ttft_ms"], told["ttft_attained"]) == (0.001, False)
    assert 0 < told["tpot_slack_ms"] < 60_000 and told["ttft_slack_ms"] < 0
    *others, last = stream(url, path, ask_for, usage=True)
    assert last["metrics"]["slo"]["tpot_attained"] is True
    assert not any("metrics" in chunk for chunk in others)
    for without in (body, body | {"slo": {}}):
        assert "metrics" not in ask(url, path, without)


def test_one_token_is_at_any_pace(served: tuple[FakeEngine, str]) -> None:
    told = ask(served[1], "/v1/completions", {"prompt": "x", "max_tokens": 1, "slo": {"tpot_ms": 0.001}})
    assert told["metrics"]["slo"] == {
        "tpot_ms": 0.001, "ttft_ms": None, "tpot_attained": True, "ttft_attained": None,
        "tpot_slack_ms": None, "ttft_slack_ms": None,
    }  # fmt: skip


def test_a_refusal_is_a_429(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    engine.refusal = "slo.tpot_ms: 20 cannot be kept"
    try:
        for extra in ({}, {"stream": True}):
            body = {"prompt": "x", "slo": {"tpot_ms": 20}, **extra}
            answer = httpx.post(url + "/v1/completions", json=body, timeout=PATIENCE)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "slo_unattainable")
            assert error["message"] == engine.refusal and answer.headers["retry-after"] == "1"
        ask(url, "/v1/completions", {"prompt": "x"})
    finally:
        engine.refusal = None


def test_prometheus_counts_them() -> None:
    with started() as (_, url):
        requests = {name: value for name, value in metrics(url).items() if name.startswith("slo_requests_total")}
        assert len(requests) == 4 and set(requests.values()) == {0}
        ask(url, "/v1/completions", {"prompt": "x"})  # without an SLO
        ask(url, "/v1/completions", {"prompt": "x", "n": 2, "slo": {"tpot_ms": 60_000, "ttft_ms": 60_000}})
        ask(url, "/v1/completions", {"prompt": "x", "slo": {"tpot_ms": 0.001}})
        ask(url, "/v1/completions", {"prompt": "x", "max_tokens": 1, "slo": {"tpot_ms": 0.001}})
        after = metrics(url)
    counts = {(t, a): after[f'slo_requests_total{{attained="{a}",target="{t}"}}'] for t in ("tpot", "ttft")
              for a in ("true", "false")}  # fmt: skip
    assert counts == {("tpot", "true"): 3, ("tpot", "false"): 1, ("ttft", "true"): 2, ("ttft", "false"): 0}
    assert after["slo_goodput_tokens_total{}"] == 15 and after["slo_refused_total{}"] == 0
    slack = {name: value for name, value in after.items() if name.startswith("slo_slack_ratio")}
    assert slack['slo_slack_ratio_count{target="tpot"}'] == 3  # of one token there is none
    assert slack['slo_slack_ratio_bucket{le="-4.0",target="tpot"}'] == 1
    assert slack['slo_slack_ratio_bucket{le="0.9",target="tpot"}'] == 1
    assert slack['slo_slack_ratio_bucket{le="1.0",target="tpot"}'] == 3
    assert slack['slo_slack_ratio_count{target="ttft"}'] == 2
