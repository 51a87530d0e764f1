"""Sampling parameters of requests that do not set them: the model's, as its generation_config.json has them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.fakes import FakeEngine
from helpers.serving import CHAT
from jaxspec import SamplingParams
from jaxspec.config import EngineConfig
from jaxspec.serve.__main__ import _overrides, _parser, main

MODEL = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "max_tokens": 3}


@pytest.fixture
def recommended(engine: FakeEngine) -> Iterator[dict[str, Any]]:
    engine.default_sampling = dict(MODEL)
    yield engine.default_sampling
    engine.default_sampling = {}


def params_of(http: httpx.Client, engine: FakeEngine, path: str, **body: Any) -> SamplingParams:
    subject = {"messages": CHAT} if "chat" in path else {"prompt": "hello"}
    response = http.post(path, json=subject | body)
    assert response.status_code == 200, response.text
    return engine.submitted[-1]


def used(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in MODEL}


@pytest.mark.usefixtures("recommended")
def test_chats_have_the_models_defaults(http: httpx.Client, engine: FakeEngine) -> None:
    assert used(params_of(http, engine, "/v1/chat/completions")) == MODEL
    assert used(params_of(http, engine, "/v1/chat/completions", temperature=None, top_k=None)) == MODEL


@pytest.mark.usefixtures("recommended")
def test_completions_have_16_tokens_all_the_same(http: httpx.Client, engine: FakeEngine) -> None:
    assert used(params_of(http, engine, "/v1/completions")) == MODEL | {"max_tokens": 16}
    assert params_of(http, engine, "/v1/completions", echo=True, max_tokens=0).max_tokens == 1


@pytest.mark.usefixtures("recommended")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_a_request_sets_wins(http: httpx.Client, engine: FakeEngine, path: str) -> None:
    neutral = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 5}
    assert used(params_of(http, engine, path, **neutral)) == neutral
    assert params_of(http, engine, path, max_completion_tokens=4).max_tokens == 4


def test_the_default_length_ends_with_the_context(
    http: httpx.Client, engine: FakeEngine, recommended: dict[str, Any]
) -> None:
    recommended["max_tokens"] = 100_000
    params = params_of(http, engine, "/v1/chat/completions", stop=["Eule"])
    assert params.max_tokens is not None and 400 < params.max_tokens < engine.max_model_len


@pytest.mark.usefixtures("recommended")
def test_more_min_tokens_than_the_default_length(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={"messages": CHAT, "min_tokens": 4})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "min_tokens")
    assert "at most max_tokens (3)" in response.json()["error"]["message"]


@pytest.mark.parametrize("defaults", [MODEL, {}])
def test_the_log_shows_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, defaults: dict[str, Any]
) -> None:
    fake = FakeEngine()
    fake.default_sampling = defaults
    monkeypatch.setattr("jaxspec.engine.engine.Engine", lambda config, progress: fake)
    monkeypatch.setattr("jaxspec.serve.run.serve", lambda *_: 0)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    with caplog.at_level(logging.INFO, "jaxspec.serve"):
        assert main(["--port", "0"]) == 0
    lines = [r.message for r in caplog.records if "default sampling parameters" in r.message]
    assert len(lines) == bool(defaults)
    assert all("temperature=0.6, top_p=0.95, top_k=20" in line for line in lines)


def test_options() -> None:
    argv = ["--revision", "v1.0", "--generation-config", "none"]
    config = EngineConfig.load(None, **_overrides(vars(_parser().parse_args(argv))))
    assert (config.revision, config.generation_config) == ("v1.0", "none")
    assert EngineConfig.load(None).generation_config == "auto"
