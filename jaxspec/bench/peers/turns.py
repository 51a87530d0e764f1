"""Taking turns: a worker answers one JSON line on standard input with one on standard output, and sleeps in between.

Standard library only, for workers run in other engines' environments, where jaxspec is not installed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def pin(threads: int) -> None:
    """Keeps this process on `threads` cores, which thread pools made afterwards take as their size (Linux only)."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def take_turns(make: Callable[[dict[str, Any]], Answer]) -> None:
    """Makes the engine from the first line, then answers a line with a line until standard input ends.

    Whatever libraries print to standard output goes to standard error: the answers have that channel for themselves.
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
