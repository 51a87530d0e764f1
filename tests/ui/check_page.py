"""The page in a browser: a chat, lanes that move, who waits and why, the token tree, narrow windows, keys."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from helpers.serving import eventually
from ui.browser import PATIENCE_MS, OpenPage

expect.set_options(timeout=PATIENCE_MS)
LIVE = re.compile("^live$")
MARKUP = "<img src=x onerror=alert(1)> <b>hello</b>"


def ask(page: Page, text: str, tokens: int = 60) -> None:
    """Send a message, greedily."""
    if not page.locator("#temperature").is_visible():
        page.click("#settings summary")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", str(tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def send_samples(page: Page, count: int) -> None:
    page.fill("#load-count", str(count))
    page.click("#load button")


def is_too_wide(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


def test_a_chat_streams_and_colours_accepted_drafts(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    expect(page.locator("#connection")).to_have_text(LIVE)
    expect(page.locator("#server")).to_have_text("tiny · preset two slots")
    ask(page, MARKUP)
    expect(page.locator(".message.user .said")).to_have_text(MARKUP)
    assert not page.locator("#messages img, #messages b").count()
    expect(page.locator("#stop")).to_be_visible()  # it streams
    expect(page.locator(".meta").last).to_contain_text("tokens/s")
    first = page.locator(".message.assistant .said").inner_text()
    page.click("#new-chat")
    ask(page, MARKUP)  # the same question again: now suffix drafting knows the answer
    expect(page.locator(".meta").last).to_contain_text("tokens/s")
    assert page.locator(".message.assistant .said").inner_text() == first
    said = page.locator(".message.assistant .said")
    drafts, tokens = said.locator(".token.draft").count(), said.locator(".token").count()
    assert 0 < drafts < tokens <= 60
    summary = page.locator(".meta").last.inner_text()
    for part in ("first token after", "tokens per verification", "of the drafts accepted", "of the answer drafted"):
        assert part in summary
    expect(page.locator("#tree .node.accepted").first).to_be_visible()
    expect(page.locator("#tree-path .draft").first).to_be_visible()
    expect(page.locator("#tree-note")).to_contain_text("draft tokens accepted")
    expect(page.get_by_role("img", name=re.compile("^Token tree of .* nodes. Accepted: .* Rejected: "))).to_be_visible()


def test_stop_ends_the_answer(url: str, open_page: OpenPage, engine: Any) -> None:
    page = open_page(url)
    expect(page.locator("#connection")).to_have_text(LIVE)
    ask(page, MARKUP, tokens=300)
    expect(page.locator(".message.assistant .token").first).to_be_visible()
    expect(page.locator(".lane", has_text="your chat")).to_contain_text("decoding")
    page.click("#stop")
    expect(page.locator(".failure")).to_have_text("Stopped.")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#prompt")).to_be_focused()  # the button that had the focus is gone
    expect(page.locator("#summary")).to_contain_text("No requests")
    assert engine.stats().running == 0


def test_lanes_move_and_say_who_waits_and_why(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    expect(page.locator("#connection")).to_have_text(LIVE)
    page.click("#settings summary")
    page.fill("#max-tokens", "100")
    page.fill("#tpot", "1000")
    send_samples(page, 5)
    waiting = page.locator(".lane.state-waiting")
    expect(waiting.first.locator(".why")).to_have_text("All 2 slots are taken. It is next.")
    expect(waiting.last.locator(".why")).to_contain_text("ahead of it: shorter predicted answers go first.")
    expect(page.locator("#summary")).to_contain_text("requests wait: #")
    expect(page.locator("#tile-running")).to_contain_text("2 of 2 slots")
    selector = f'.lane[data-id="{waiting.first.get_attribute("data-id")}"]'
    lane = page.locator(selector)
    before = lane.locator("svg").get_attribute("viewBox")
    page.wait_for_selector(f"{selector}.state-decoding")  # at once, unlike `expect`, which looks now and then
    assert lane.locator("svg").get_attribute("viewBox") != before
    assert lane.locator("rect.state-waiting").count() and lane.locator("rect.state-decoding").count()
    expect(lane.locator(".slack")).to_contain_text("TPOT 1.0 s: slack")
    lane.focus()
    expect(lane.locator(".history")).to_contain_text("All 2 slots are taken")
    expect(lane.locator("svg")).to_have_attribute("aria-label", re.compile("^The last minute: waiting .* → decoding "))
    expect(lane).to_have_class(re.compile("ended"))
    expect(lane.locator(".badge")).to_have_text(re.compile("^ended: (length|stop)$"))
    expect(lane.locator(".numbers")).to_have_text(re.compile("^[1-9][0-9]* tokens? written · took "))
    expect(page.locator("#summary")).to_contain_text("No requests")
    expect(page.locator("#tile-slo-met-by")).to_contain_text("%")


def test_who_wants_less_motion_gets_a_picture_every_two_seconds(url: str, open_page: OpenPage) -> None:
    pictures = {}
    for motion in ("no-preference", "reduce"):
        page = open_page(url, reduced_motion=motion)
        expect(page.locator("#connection")).to_have_text(LIVE)
        send_samples(page, 1)
        expect(page.locator(".lane").first).to_be_visible()
        pictures[motion] = page.evaluate(
            """async () => {
                const seen = new Set(), bar = document.querySelector(".lane svg"), end = performance.now() + 3000;
                while (performance.now() < end) {
                    seen.add(bar.getAttribute("viewBox"));
                    await new Promise((resume) => setTimeout(resume, 50));
                }
                return seen.size;
            }"""
        )
    assert 1 <= pictures["reduce"] <= 3 < pictures["no-preference"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_at_400_pixels(url: str, open_page: OpenPage, scheme: str) -> None:
    page = open_page(url, width=400, height=800, color_scheme=scheme)
    expect(page.locator("#connection")).to_have_text(LIVE)
    assert not is_too_wide(page)
    send_samples(page, 4)
    expect(page.locator(".lane.state-waiting").first).to_be_visible()
    ask(page, "long" * 60, tokens=30)
    expect(page.locator(".meta").last).to_contain_text("tokens/s")
    expect(page.locator("#tree svg")).to_be_visible()
    assert not is_too_wide(page)
    small = page.evaluate(
        "[...document.querySelectorAll('body *')].filter((e) => e.innerText && e.checkVisibility())"
        ".map((e) => parseFloat(getComputedStyle(e).fontSize)).filter((size) => size < 13)"
    )
    assert not small
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea')].filter((e) => !e.labels.length).map((e) => e.id)"
    )
    assert not unnamed


def test_with_a_key(keyed_url: str, open_page: OpenPage) -> None:
    page = open_page(keyed_url, failing=2)
    expect(page.locator("#key-form")).to_be_visible()
    expect(page.locator("#connection")).to_have_text("needs an API key")
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    expect(page.locator("#connection")).to_have_text(LIVE)
    expect(page.locator("#key-form")).to_be_hidden()
    ask(page, "hello", tokens=8)
    expect(page.locator(".meta").last).to_contain_text("tokens/s")
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]


def test_a_hidden_tab_does_not_watch(url: str, open_page: OpenPage, engine: Any) -> None:
    page = open_page(url)
    expect(page.locator("#connection")).to_have_text(LIVE)
    assert engine.loop.live.watched
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    eventually(lambda: not engine.loop.live.watched)


def test_the_live_view_can_be_paused(url: str, open_page: OpenPage, engine: Any) -> None:
    page = open_page(url)
    expect(page.locator("#connection")).to_have_text(LIVE)
    page.click("#pause")
    expect(page.locator("#connection")).to_have_text("paused")
    expect(page.get_by_role("button", name="Pause", pressed=True)).to_be_visible()
    eventually(lambda: not engine.loop.live.watched)
    lanes = page.locator(".lane").count()  # of requests that had just ended
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # back from another tab
    ask(page, "hello", tokens=8)  # the chat goes on
    expect(page.locator(".meta").last).to_contain_text("tokens/s")
    expect(page.locator(".lane")).to_have_count(lanes)
    assert not engine.loop.live.watched
    page.click("#pause")
    expect(page.locator("#connection")).to_have_text(LIVE)
    eventually(lambda: engine.loop.live.watched)


def test_requests_too_short_for_a_snapshot_have_lanes(
    url: str, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxspec.engine.live_view.INTERVAL", 1.0)
    page = open_page(url)
    expect(page.locator("#connection")).to_have_text(LIVE)
    ask(page, "hello", tokens=1)
    lane = page.locator(".lane", has_text="(your chat)")
    expect(lane.locator(".badge")).to_have_text(re.compile("^ended: (length|stop)$"))
    expect(lane.locator(".numbers")).to_have_text(re.compile("^1 token written · took "))
    expect(lane.locator("rect")).not_to_have_count(0)


def test_without_the_page(bare_url: str, open_page: OpenPage) -> None:
    page = open_page(bare_url, failing=2)  # the page, and the icon that browsers ask for
    expect(page.locator("body")).to_contain_text("unknown route: GET /")
