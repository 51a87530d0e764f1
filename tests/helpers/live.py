"""Snapshots for tests of `/live`, and its events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from jaxspec.engine.live_snapshot import LiveNode, LiveRequest, LiveSnapshot, LiveTree


def live_request(id: str = "r", tenant: str = "", **changes: Any) -> LiveRequest:
    given: dict[str, Any] = dict(
        state="waiting", reason="The only slot is taken. It is next.", place=0, age=1.5, prompt_tokens=8, prompt_done=0,
        output_tokens=0, max_tokens=16, predicted=12.4, proposed=0, accepted=0, preemptions=0, tpot=0.04, ttft=0.5,
        slack_of="ttft", slack=-1.0,
    )  # fmt: skip
    return LiveRequest(id, tenant, **{**given, **changes})


def live_tree(id: str = "r", tenant: str = "") -> LiveTree:
    """A root, an accepted and a rejected draft, and the bonus token."""
    nodes = (
        LiveNode("secret", -1, 0, True),
        LiveNode(" text", 0, 1, True, ("suffix",)),
        LiveNode(" no", 0, 1, False, ("suffix", "eagle")),
        LiveNode("!", 1, 2, True),
    )
    return LiveTree(id, tenant, 0.1, nodes, 2, 1)


def live_snapshot(time: float = 1.0, **changes: Any) -> LiveSnapshot:
    given: dict[str, Any] = dict(
        policy={"order": "sjf"}, rule="shorter predicted answers go first", drafters=("suffix", "eagle"), running=1,
        waiting=1, paused=0, swapped=0, slots=1, kv_usage=0.25, kv_pages=100, tokens_per_second=33.33,
        acceptance_rate=None, mean_accepted_length=1.5,
    )  # fmt: skip
    return LiveSnapshot(time, **{**given, **changes})


def live_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The snapshots of a stream as they arrive."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
