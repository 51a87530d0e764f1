"""Pages in the browser whose console and requests are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page

#: Milliseconds until the page must have changed.
PATIENCE_MS = 60_000
#: The fixture `open_page`.
OpenPage = Callable[..., Page]


@contextmanager
def opened(browser: Browser, url: str, width: int, height: int, failing: int, **options: Any) -> Iterator[Page]:
    """A page. At the end its console must be clean but for `failing` refused requests, and all requests its own."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    problems: list[str] = []
    foreign: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: problems.append(str(e)))
    page.on("request", lambda r: None if r.url.startswith(url) else foreign.append(r.url))
    page.goto(f"{url}/")
    yield page
    context.close()
    refused = [problem for problem in problems if "Failed to load resource" in problem]
    assert len(refused) == failing and len(problems) == failing, problems
    assert not foreign
