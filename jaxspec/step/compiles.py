"""Counts XLA compilations in this process, to show that none happens after warm-up."""

from __future__ import annotations

from functools import lru_cache

import jax.monitoring


class CompileCounter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


@lru_cache(maxsize=1)
def compile_counter() -> CompileCounter:
    """The process's counter. JAX's listeners are per process and stay registered, so there is one."""
    counter = CompileCounter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    return counter
