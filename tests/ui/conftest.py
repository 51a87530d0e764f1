"""A browser, and servers of a slowed tiny model with two slots, so that requests wait."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from helpers import tiny
from helpers.serving import serving
from jaxspec.serve.app import ServerOptions
from ui.browser import OpenPage, opened

#: Seconds that each step takes longer, so that one can watch it.
PAUSE = 0.03
SETTINGS: dict[str, Any] = dict(
    draft=["suffix"], tree="chain", order="sjf", page_size=16, max_num_seqs=2, token_buckets=[1, 16, 64],
    max_num_batched_tokens=64, max_model_len=400, kv_cache_tokens=2048, compilation_cache_dir="",
)  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = os.environ.get("CHROMIUM")
    assert program, "no Chromium on PATH: install it (apt-get install chromium), or set CHROMIUM to the program"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    with tiny.llm(**SETTINGS) as llm:
        step = llm.engine.loop.step

        def slowed() -> None:
            time.sleep(PAUSE)
            step()

        llm.engine.loop.step = slowed
        yield llm.engine


@pytest.fixture(scope="session")
def url(engine: Any) -> Iterator[str]:
    with serving(engine, ServerOptions(preset="two slots")) as url:
        yield url


@pytest.fixture(scope="session")
def keyed_url(engine: Any) -> Iterator[str]:
    with serving(engine, ServerOptions(api_keys=("secret",))) as url:
        yield url


@pytest.fixture(scope="session")
def bare_url(engine: Any) -> Iterator[str]:
    with serving(engine, ServerOptions(ui=False)) as url:
        yield url


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens a page. At the end of the test, its console must be clean, and all that it asked for from its server."""
    with ExitStack() as stack:

        def open_it(url: str, width: int = 1400, height: int = 1000, failing: int = 0, **options: Any) -> Page:
            """`failing`: how many requests the server refuses, which the browser reports on the console."""
            return stack.enter_context(opened(browser, url, width, height, failing, **options))

        yield open_it
