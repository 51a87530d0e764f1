"""Writes docs/page.png, the page with SmolLM2 in three slots: `make screenshot`, `make_screenshot.py [FILE [WIDTH]]`.

`$CHROMIUM` is the browser. Needs Playwright and Pillow.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, TimeoutError, sync_playwright

FILE = Path(__file__).parent / "page.png"
WIDTH = 1400
HEIGHT = 1380
#: Nodes of the tree that is shown, and the milliseconds to wait for one.
NODES, TREE_MS = 4, 3000
#: The second answer repeats much of the first, so that drafts are accepted.
QUESTIONS = "Write a Python function that adds the numbers of a list.", "Write it again, with a docstring."
PATIENCE_MS = 120_000


@contextmanager
def server() -> Iterator[str]:
    """The URL of a server that ends with the context."""
    command = [sys.executable, "-m", "jaxspec.serve", "--config", "configs/default.yaml"]
    command += ["--max-num-seqs", "3", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", greeting := process.stdout.readline())
            assert found, f"the server did not start: {greeting!r}"
            yield found[0]
        finally:
            process.terminate()


def chat(page: Page) -> None:
    """Ask the questions, greedily."""
    page.click("#settings summary")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "160")
    page.fill("#tpot", "60")
    page.fill("#ttft", "4000")
    page.click("#settings summary")
    for number, question in enumerate(QUESTIONS, 1):
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.locator(".meta", has_text="tokens/s").nth(number - 1).wait_for()


def main(file: Path = FILE, width: int = WIDTH) -> None:
    with server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"])
        page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme="light")
        page.set_default_timeout(PATIENCE_MS)
        page.goto(url)
        chat(page)
        page.fill("#load-count", "8")
        page.click("#load button")
        page.locator(".lane.ended", has_text=" written").nth(3).wait_for()  # two chats, two samples
        with suppress(TimeoutError):
            page.locator("#tree .node").nth(NODES - 1).wait_for(timeout=TREE_MS)
        picture = Image.open(io.BytesIO(page.screenshot(full_page=width < WIDTH)))
        browser.close()
    # A page has few colours: with a palette the file is a third as large.
    picture.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE).save(file, optimize=True)


if __name__ == "__main__":
    main(*(kind(word) for kind, word in zip((Path, int), sys.argv[1:], strict=False)))
