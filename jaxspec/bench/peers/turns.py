"""The worker side of the protocol: one JSON line on standard output for each JSON line on standard input.

Uses the standard library only, because workers run in other engines' environments, without jaxspec.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def pin(threads: int) -> None:
    """Pin this process to `threads` cores, so that thread pools created later have this size (Linux only)."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def take_turns(make: Callable[[dict[str, Any]], Answer]) -> None:
    """Create the engine with the settings of the first line, then process lines until standard input ends.

    Standard output is reserved for replies: whatever libraries print there is redirected to standard error.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def reply(content: dict[str, Any]) -> None:
        channel.write(json.dumps(content) + "\n")
        channel.flush()

    answer = make(json.loads(sys.stdin.readline()))
    reply({"ready": True})
    for line in sys.stdin:
        reply(answer(json.loads(line)))
