"""Calls that other threads have the engine's thread make between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxspec.engine.loop import EngineLoop

T = TypeVar("T")


class Calls:
    """A queue of calls, each with the future of its result. Threads may add to it while the engine's empties it."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[EngineLoop], Any], Future[Any]]] = deque()

    def __bool__(self) -> bool:
        """Whether calls are waiting to be made."""
        return bool(self._waiting)

    def add(self, call: Callable[[EngineLoop], T]) -> Future[T]:
        """Queue a call. -> its result; the future fails with what the call raises."""
        future: Future[T] = Future()
        self._waiting.append((call, future))
        return future

    def make(self, loop: EngineLoop) -> None:
        """Make all that are queued, except those whose futures were cancelled."""
        while self._waiting:
            call, future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(loop))
                except Exception as error:
                    future.set_exception(error)

    def fail(self, error: Exception) -> None:
        """No step follows: all that are queued fail."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
