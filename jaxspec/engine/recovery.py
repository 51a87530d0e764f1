"""What happens after a failed step: the engine restarts in place, and its requests go on with the same tokens.

A failed step may have lost the donated KV pool, and where it failed decides what state the scheduler is in. So nothing
is repaired: device memory is emptied, the scheduler forgets all plans, and requests are queued again with the tokens
that they have. Their KV is computed again, so they get the tokens that they would have got; not with INT8 KV, lossy
swapping, or sampling with rejection. Compiled programs and weights stay.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxspec.compilation import planned
from jaxspec.draft.registry import flush, runners
from jaxspec.engine.request_state import RequestState
from jaxspec.sched.request import Request
from jaxspec.sched.spec.drafter import DrafterFailed

if TYPE_CHECKING:
    from jaxspec.engine.loop import EngineLoop

log = logging.getLogger(__name__)

#: Default of `Recovery.most_restarts`, and the seconds in which restarts are counted.
MOST_RESTARTS, WITHIN = 10, 300.0
#: Steps in a row that fail with a request: from the first number on it is tried alone, at the second it is ended.
_ALONE, _ENDED = 2, 3


class Recovery:
    """Restarts an engine loop in place. Only the engine's thread uses it, except for `held_back`.

    Most failures are not a request's fault, and do not come again. Requests that were in two failed steps without
    getting a token between are tried alone, one after another. One that fails alone is ended with an error, so that it
    does not cost the others more. A drafter that fails is blamed itself, see `Speculator.drafter_failed`; for failures
    outside of planning, launching and reading a step, no request is blamed.
    """

    def __init__(self, loop: EngineLoop, clock: Callable[[], float]) -> None:
        self._loop, self._clock = loop, clock
        self._runners = runners(loop.speculator)  # also those that draft no more: their pools can be swapped
        self._restarts: deque[float] = deque()  # when, within the last `WITHIN` seconds
        #: The engine gives up at more restarts than this within `WITHIN` seconds.
        self.most_restarts = MOST_RESTARTS
        self._trial: RequestState | None = None
        self._line: list[RequestState] = []  # not in the scheduler as long as one is tried alone
        #: Restarts since the start.
        self.count = 0

    @property
    def trying(self) -> bool:
        """Whether a request is being tried alone."""
        return self._trial is not None

    @property
    def held_back(self) -> list[Request]:
        """Requests that wait until others have been tried alone. May be called from any thread."""
        return [state.request for state in self._line.copy()]

    def keep_back(self, state: RequestState) -> bool:
        """Keep back a new request if another one is being tried alone. -> whether it is kept back."""
        if self.trying:
            self._line.append(state)
        return self.trying

    def proceed(self) -> None:
        """Call before each step: end the trial of a request that has got a token or ended."""
        if (trial := self._trial) is not None and (trial.finish_reason is not None or not trial.failures):
            self._loop.finish_steps()
            self._line.append(trial)
            self._next()

    def recover(self, error: Exception) -> bool:
        """Restart after a failure. -> True. Raises `error` if that has happened too often lately. Restarts after which
        a request or a drafter is gone do not count: the reason is gone too."""
        loop, now = self._loop, self._clock()
        while self._restarts and self._restarts[0] < now - WITHIN:
            self._restarts.popleft()
        if len(self._restarts) >= self.most_restarts:
            log.error("%d steps failed within %.0f s: the engine gives up", self.most_restarts + 1, WITHIN)
            raise error
        self.count += 1
        log.error("a step failed, the engine restarts in place", exc_info=error)
        loop.drop_steps()
        if not self._blame(error):
            self._restarts.append(now)
        line = {id(state): state for state in (*self._line, *loop.unfinished)}
        self._line = list(line.values())
        self._next()
        return True

    def _blame(self, error: Exception) -> bool:
        """Count the failure against the drafter, or the requests that may be why. -> whether that ends one of them."""
        loop = self._loop
        if isinstance(error, DrafterFailed):
            flush(loop.speculator)  # what it has learned
            if gone := loop.speculator.drafter_failed(error):
                log.error("%s has failed too often and drafts no more", loop.speculator.drafters[error.drafter].name)
            return gone
        suspects, ended = {request.id for request in loop.suspects}, False
        for state in loop.unfinished:
            if state.request.id in suspects:
                state.failures += 1
                if state.failures >= _ENDED:
                    loop.end(state, "error", f"{state.failures} steps in a row failed with this request: {error}")
                    ended = True
        return ended

    def _next(self) -> None:
        """Restart with the next request to be tried alone, else with all."""
        self._line = [state for state in self._line if state.finish_reason is None]
        self._trial = next((state for state in self._line if state.failures >= _ALONE), None)
        if self._trial is not None:
            self._line.remove(self._trial)
            self._begin_with([self._trial])
            return
        self._begin_with([state for state in self._line if state.scheduled])
        while self._line:  # new ones
            if not (state := self._line.pop(0)).scheduled:
                self._loop.add(state, state.request.arrival)

    def _begin_with(self, states: Sequence[RequestState]) -> None:
        loop = self._loop
        for state in states:
            request = state.request
            request.tokens[request.prompt_len :] = state.output  # a failed step may have left others
        with planned():  # arrays of zeros are programs, too
            loop.model_runner.reset()
            usable = runners(loop.speculator)
            for runner in self._runners:
                if runner in usable or not runner.own_device:
                    runner.reset()
        loop.host.clear()
        loop.scheduler.restart([state.request for state in states], self._clock())
