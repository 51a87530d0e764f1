"""The ledger of a simulation: makes the requests of a workload, and keeps what happens to each."""

from __future__ import annotations

from math import isnan, nan

import numpy as np

from jaxspec.sched.request import Request
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.slo import NONE, Slo


class Ledger:
    """One entry per request of `workload`, in lists: indexing an array element by element would box each number.

    Several simulations can share one, which each serve a part of the requests. `room`: tokens of context and KV that a
    request can have. `slo`: of all requests, if the workload has no SLOs of its own.
    """

    def __init__(self, workload: Workload, room: int, slo: Slo = NONE) -> None:
        self.workload = workload
        n = len(workload)
        self.arrival: list[float] = workload.arrival.tolist()
        self._input: list[int] = workload.input.tolist()
        self._predicted: list[float] = workload.predicted.tolist()
        self._slos, self._slo = workload.slos, slo
        if workload.max_tokens is not None:
            self._max_tokens: list[int] = workload.max_tokens.tolist()
        else:
            most = np.minimum(workload.caps, room - workload.input)
            self._max_tokens = np.maximum(workload.output, most).tolist()
        #: Output tokens still to be generated.
        self.left: list[int] = workload.output.tolist()
        self.first_scheduled, self.first_token, self.finished = ([nan] * n for _ in range(3))
        self.preemptions, self.drafted, self.accepted, self.rounds, self.cached = ([0] * n for _ in range(5))

    def __len__(self) -> int:
        return len(self.left)

    def request(self, i: int) -> Request:
        """The i-th request, before any of its output."""
        count, prompts = self._input[i], self.workload.prompts
        tokens = [0] * count if prompts is None else prompts.tokens(i, count)
        request = Request(str(i), count, tokens, self._max_tokens[i], self.arrival[i])
        request.true_len = self.left[i]
        request.slo = self._slo if self._slos is None else self._slos[i]
        if not isnan(self._predicted[i]):  # otherwise the scheduler's length oracle predicts
            request.predicted_len = self._predicted[i]
        return request
