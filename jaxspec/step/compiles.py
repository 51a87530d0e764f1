"""Counts XLA compilations in this process, to show that none happens in a request's way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import jax.monitoring

_here = threading.local()


class CompileCounter:
    """`count` are the compilations so far, without those of `planned` blocks."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and not getattr(_here, "planned", False):
            self.count += 1


@contextmanager
def planned() -> Iterator[None]:
    """Compilations of this thread in the block are ahead of time: no request waits for them."""
    before, _here.planned = getattr(_here, "planned", False), True
    try:
        yield
    finally:
        _here.planned = before


@lru_cache(maxsize=1)
def compile_counter() -> CompileCounter:
    """The process's counter. JAX's listeners are per process and stay registered, so there is one."""
    counter = CompileCounter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    return counter
