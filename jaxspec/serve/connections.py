"""Connections: how many there are, and how long a client may take to ask for something.

uvicorn waits forever for a connection's first request, and for the rest of a header.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

#: Most open connections, and seconds for a header.
MAX_CONNECTIONS, HEADER_SECONDS = 2048, 15.0
#: Looks in a row, `seconds` apart, at which a client has not read any of what is too much to be buffered.
_STUCK = 4


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol. Connections beyond `most` are closed at once, and those that have sent no whole header
    within `seconds`; after a first request, within twice as many; and those of clients that read nothing of a full
    buffer for four times as many. A header has at most 64 KiB, which h11 sees to.
    """

    def __init__(self, *args: Any, most: int, seconds: float, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._most, self._seconds = most, seconds
        self._last: Any = self  # the request of the last look; none yet
        self._unsent = self._stuck = 0  # bytes at the last look, and looks since they got fewer

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.abort()
        else:
            self.loop.call_later(self._seconds, self._look)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent = self._stuck = 0

    def _look(self) -> None:
        """Close the connection if it has waited for a header since the last look, or if its client does not read."""
        if self not in self.connections:
            return
        unsent = self.transport.get_write_buffer_size()
        # uvicorn waits for such a client without a limit, also when it closes the connection.
        full = self.flow.write_paused or (unsent and self.transport.is_closing())
        self._stuck = self._stuck + 1 if full and unsent >= self._unsent > 0 else 0
        self._unsent = unsent
        if self._stuck >= _STUCK:
            self.transport.abort()
            return
        if self.transport.is_closing():
            if unsent:
                self.loop.call_later(self._seconds, self._look)
            return
        request = self.cycle
        # Between two requests uvicorn has a timer of its own, until the next one begins.
        waiting = (request is None or request.response_complete) and self.timeout_keep_alive_task is None
        if waiting and (request is None or request is self._last):
            self.transport.close()
            return
        self._last = request if waiting else None
        self.loop.call_later(self._seconds, self._look)


def room_for(most: int, others: int = 512) -> int:
    """Let the process open `most` connections and `others` files, if the system allows it. -> connections that fit.
    Linux allows 1,024 files by default, macOS 256, unless a process asks for more."""
    try:
        import resource  # Unix only
    except ImportError:
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most + others:
        wanted = most + others if hard == resource.RLIM_INFINITY else min(hard, most + others)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
        except (OSError, ValueError):  # macOS has a limit of its own, which it does not tell
            wanted = soft
        return max(1, min(most, max(soft, wanted) - others))
    return most


def protocol(most: int = MAX_CONNECTIONS, seconds: float = HEADER_SECONDS) -> Any:
    """The protocol with these bounds, for uvicorn's `http`."""
    return partial(BoundedProtocol, most=most, seconds=seconds)
