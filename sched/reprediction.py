"""Predicts the lengths of running requests again, from what the target knows while it generates (TRAIL)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import inf, sqrt

from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import Scheduler

log = logging.getLogger(__name__)


def smoothed(output_len: int, left: float, predicted: float | None) -> float:
    """The new prediction of the output length after `output_len` tokens: what is `left` becomes its geometric mean with
    what the old prediction leaves, for single probes are noisy."""
    if predicted is not None:
        left = sqrt(left * max(predicted - output_len, 1.0))
    return output_len + left


class Repredictor:
    """Every `every` output tokens of a request, while others wait, replaces its prediction.

    `left_of` gives the tokens that each of these requests is expected still to generate: on the engine by the length
    probe (`jaxspec.step.probe`), in the simulator from a recording; `smoothed` with the old prediction. Requests that
    are due are collected, so that the probe runs once in `every` / 2 steps at most.
    """

    def __init__(
        self, scheduler: Scheduler, every: int, left_of: Callable[[Sequence[Request]], Sequence[float]]
    ) -> None:
        self._scheduler, self._every, self._left_of = scheduler, every, left_of
        self._next = PerRequest[int](lambda _: every)
        self._pause = 0.0  # steps until the next run
        #: Predictions made, for metrics and tests.
        self.made = 0

    def due(self) -> list[Request]:
        """Call once a step: the requests to predict now. Their results must have been read before `predict`."""
        self._pause -= 1
        if self._pause > 0 or not self._scheduler.waiting:
            return []
        return [r for r in self._scheduler.running if r.output_len >= self._next.of(r) and r.decoding]

    def predict(self, due: Sequence[Request], now: float) -> None:
        """Predict these requests again, between steps. Those that have ended since, or whose tokens are computed again
        after a preemption, are left out. If `left_of` fails, first predictions stay, and it is not called again."""
        due = [r for r in due if r.decoding and r.pages and not r.ended]
        if not due:
            return
        self._pause = self._every // 2
        try:
            lefts = self._left_of(due)
        except Exception:
            log.exception("the length probe failed, and predicts no more")
            self._pause = inf
            return
        for request, left in zip(due, lefts, strict=True):
            self._next.set(request, request.output_len + self._every)
            length = smoothed(request.output_len, left, request.predicted_len)
            self._scheduler.predicted(request.id, length, now, again=True)
            self.made += 1
