"""The page at `/`: its files, and what they may load."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from helpers.fakes import FakeEngine
from helpers.paths import ROOT
from helpers.serving import error_of, serving
from jaxspec.serve.app import ServerOptions

FOLDER = ROOT / "jaxspec" / "serve" / "ui"
FILES = sorted(FOLDER.iterdir())


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    engine = FakeEngine()
    engine.start()
    with serving(engine, ServerOptions(api_keys=("key",))) as url, httpx.Client(base_url=url) as client:
        yield client
    engine.shutdown()


def test_the_page_needs_no_key_and_its_data_do(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert http.get("/v1/models").status_code == http.get("/live").status_code == 401


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files(http: httpx.Client, file: object) -> None:
    name = getattr(file, "name", "")
    answer = http.get(f"/ui/{name}")
    assert answer.status_code == 200 and answer.content == (FOLDER / name).read_bytes()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_every_control_has_a_label() -> None:
    page = (FOLDER / "index.html").read_text()
    labelled = "".join(re.findall(r"<label\b.*?</label>", page, re.DOTALL))
    names = set(re.findall(r'<label for="([\w-]+)"', page))
    for control in re.findall(r"<(?:input|select|textarea)\b[^>]*>", page):
        assert control in labelled or re.findall(r'id="([\w-]+)"', control)[0] in names, control
    buttons = re.findall(r"<button\b[^>]*>(.*?)</button>", page)
    assert len(buttons) >= 4 and all(buttons)
    for shown in ("messages", "connection", "server", "notice", "summary"):  # what changes is announced
        assert re.search(rf'id="{shown}" role="(?:status|alert|log)"', page), shown


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_told_from_what_is_behind_it(scheme: int) -> None:
    """The contrasts of WCAG 2.2, level AA: 4.5 for text, 3 for the bounds of controls and for what lanes show."""
    palettes = re.findall(r":root \{(.*?)\}", (FOLDER / "style.css").read_text(), re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): #(\w{6});", palettes[scheme]))

    def luminance(name: str) -> float:
        parts = [int(colours[name][i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    text = [(name, other) for name in ("text", "muted", "accent", "good", "bad") for other in ("ground", "panel")]
    for name, other in [*text, ("on-accent", "accent"), ("text", "draft")]:
        assert contrast(name, other) >= 4.5, (name, other)
    for name in ("control", "draft-line", "waiting", "paused", "swapped", "prefill", "decoding", "throttled"):
        assert all(contrast(name, other) >= 3 for other in ("ground", "panel")), name


def test_unknown_files(http: httpx.Client) -> None:
    for name in ("missing.js", "..%2fapp.py"):
        answer = http.get(f"/ui/{name}", headers={"Authorization": "Bearer key"})
        assert answer.status_code == 404
        error_of(answer)


def test_nothing_comes_from_elsewhere_or_enters_as_html() -> None:
    for file in FILES:
        text = file.read_text()
        assert not re.findall(r"""(?:src|href)=["'](?!ui/)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert file.suffix != ".html" or not re.search(r"<script>|<style|\son\w+=| style=", text)
    linked = re.findall(r"\"ui/([\w.]+)\"", (FOLDER / "index.html").read_text())
    imported = {name for file in FILES for name in re.findall(r'from "\./([\w.]+)"', file.read_text())}
    assert {file.name for file in FILES} == {"index.html", *linked, *imported}
