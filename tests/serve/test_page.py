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
