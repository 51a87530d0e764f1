"""A server with the fake engine, and clients for it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from helpers.fakes import FakeEngine
from helpers.patience import PATIENCE
from helpers.serving import serving
from jaxspec.serve.app import ServerOptions


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    engine.start()
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(engine, ServerOptions(max_body=100_000)) as url:
        yield url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
