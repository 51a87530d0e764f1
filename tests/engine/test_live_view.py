"""The live view: what snapshots show, and that the engine does nothing for them while nobody watches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from helpers import tiny
from helpers.generation import GREEDY
from helpers.patience import PATIENCE
from helpers.serving import eventually
from jaxspec import LLM, SamplingParams
from jaxspec.engine.live_snapshot import MAX_REQUESTS, LiveSnapshot
from jaxspec.engine.live_view import LiveView
from jaxspec.outputs import OutputDelta

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    sizes: dict[str, Any] = dict(
        max_num_seqs=2, token_buckets=[1, 16, 64], max_num_batched_tokens=64, max_model_len=128, kv_cache_tokens=1024,
        page_size=16, compilation_cache_dir="", max_queued_requests=200,
    )  # fmt: skip
    with tiny.llm(draft=["suffix"], tree="chain", order="sjf", **sizes) as llm:
        yield llm


class Watching:
    """Collects snapshots, for as long as its context lasts."""

    def __init__(self, llm: LLM) -> None:
        self._engine, self.seen = llm.engine, list[LiveSnapshot]()

    def __enter__(self) -> Watching:
        self._stop = self._engine.watch(self.seen.append)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


@pytest.fixture
def each_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot after every step, however fast the machine is."""
    monkeypatch.setattr("jaxspec.engine.live_view.INTERVAL", 0.0)
    llm.engine.loop.live._due = 0.0


def crowd(llm: LLM, count: int, params: SamplingParams = LONG) -> None:
    """Run requests at once, and wait for them."""
    done = threading.Semaphore(0)

    def on_output(delta: OutputDelta) -> None:
        if delta.finish_reason is not None:
            done.release()

    for i in range(count):
        llm.engine.submit([i % 250, i // 250, 7], params, on_output, request_id=f"r{i}", tenant=f"t{i % 2}")
    for _ in range(count):
        assert done.acquire(timeout=PATIENCE)


def test_nobody_looks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("called although nobody watches")

    for name in ("verified", "ended", "planned", "look", "_snapshot"):
        monkeypatch.setattr(LiveView, name, never)
    out = llm.generate([[1, 2, 3]] * 3, LONG)
    assert all(len(o.outputs[0].token_ids) == 60 for o in out)
    assert llm.engine.health == "ok"


def test_lanes_states_and_reasons(llm: LLM, each_step: None) -> None:
    with Watching(llm) as watching:
        crowd(llm, 5)
    busy = next(s for s in watching.seen if s.running == 2 and s.waiting == 3)
    assert (busy.slots, busy.rule, busy.policy["order"]) == (2, "shorter predicted answers go first", "sjf")
    waiting, running = busy.requests[:3], busy.requests[3:]
    assert [r.place for r in waiting] == [0, 1, 2] and {r.state for r in waiting} == {"waiting"}
    assert waiting[0].reason == "All 2 slots are taken. It is next."
    assert all(r.place is None and r.state in ("prefill", "decoding") for r in running)
    assert 0 < busy.kv_usage <= 1 and {r.tenant for r in busy.requests} == {"t0", "t1"}
    assert max(s.tokens_per_second for s in watching.seen) > 0
    states = {s for snapshot in watching.seen for r in snapshot.requests if r.id == "r4" for s in (r.state,)}
    assert {"waiting", "decoding"} <= states


def test_ends_are_told_for_some_seconds(llm: LLM, each_step: None, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.engine.loop.live._ended.clear()
    with monkeypatch.context() as patch, Watching(llm) as watching:
        patch.setattr("jaxspec.engine.live_view._WINDOW", PATIENCE)
        llm.generate([[1, 2], [3, 4]], [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 9)])
        crowd(llm, 1)
        eventually(lambda: len(watching.seen[-1].ended) == 3)
        ends = watching.seen[-1].ended
    assert [(end.output_tokens, end.finish_reason) for end in ends] == [(3, "length"), (9, "length"), (60, "length")]
    assert all(end.took > 0 for end in ends)
    with Watching(llm) as watching:
        eventually(lambda: bool(watching.seen) and not watching.seen[-1].ended)


def test_the_tree_of_each_tenant(llm: LLM, each_step: None) -> None:
    crowd(llm, 2)
    with Watching(llm) as watching:
        crowd(llm, 2)  # what suffix drafting has seen
    last = watching.seen[-1]
    assert last.trees.keys() == {"t0", "t1"}
    tree = next(tree for s in watching.seen for tree in s.trees.values() if tree.tenant == "t1" and tree.accepted > 1)
    root, *rest = tree.nodes
    assert (root.parent, root.depth, root.accepted, root.drafters) == (-1, 0, True, ())
    assert all(node.parent < i and node.depth == tree.nodes[node.parent].depth + 1 for i, node in enumerate(rest, 1))
    drafts, bonus = rest[:-1], rest[-1]
    assert len(drafts) == tree.proposed and sum(node.accepted for node in drafts) == tree.accepted
    assert {node.drafters for node in drafts} == {("suffix",)} and bonus.drafters == () and bonus.accepted
    path = [node for node in tree.nodes if node.accepted]
    assert [node.depth for node in path] == list(range(tree.accepted + 2))
    assert max(s.mean_accepted_length or 0 for s in watching.seen) > 1


def test_the_number_of_requests_is_bounded(llm: LLM, each_step: None) -> None:
    with Watching(llm) as watching:
        crowd(llm, 90, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    fullest = max(watching.seen, key=lambda s: s.waiting)
    assert fullest.waiting > MAX_REQUESTS and len(fullest.requests) == MAX_REQUESTS
    assert sum(r.place is None for r in fullest.requests) == fullest.running == 2  # they keep their places


def test_an_idle_engine_is_shown_as_idle(llm: LLM) -> None:
    llm.generate([[1]], GREEDY)
    with Watching(llm) as watching:
        eventually(lambda: len(watching.seen) > 1)
    assert (watching.seen[-1].running, watching.seen[-1].requests) == (0, ())
    assert not llm.engine.loop.live.watched


def test_a_watcher_that_fails_disturbs_nobody(llm: LLM, each_step: None, caplog: pytest.LogCaptureFixture) -> None:
    def failing(_: LiveSnapshot) -> None:
        raise RuntimeError("no")

    stop = llm.engine.watch(failing)
    out = llm.generate([[4, 5]], GREEDY)[0].outputs[0].token_ids
    stop()
    assert out == tiny.greedy([4, 5], 12)
    assert "a watcher failed" in caplog.text


def test_accepted_drafts_are_marked(llm: LLM) -> None:
    """Of a verification all tokens but the last, and the texts of tokens join to the text."""
    deltas: list[OutputDelta] = []
    done = threading.Event()

    def on_output(delta: OutputDelta) -> None:
        deltas.append(delta)
        if delta.finish_reason is not None:
            done.set()

    for _ in range(2):
        deltas.clear()
        done.clear()
        llm.engine.submit([9, 8, 7], LONG, on_output)
        assert done.wait(PATIENCE)
    for delta in deltas:
        assert len(delta.texts) == len(delta.drafted) == len(delta.token_ids)
        assert "".join(delta.texts) == delta.text
        parts = list(delta.by_token())
        assert [part.token_ids for part in parts] == [(token,) for token in delta.token_ids]
        assert "".join(part.text for part in parts) == delta.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [delta.finish_reason]
    metrics = deltas[-1].metrics
    assert metrics is not None
    assert 0 < sum(sum(delta.drafted) for delta in deltas) <= metrics.speculation.accepted
