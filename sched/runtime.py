"""How long a request will take: ALISE's model (§3.1), fitted to the steps that were seen."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.sched.plan import Outcome, Plan
from jaxspec.sched.regression import Regression
from jaxspec.sched.request import Request
from jaxspec.sched.swapcosts import SwapCosts

#: Steps after which an observation weighs 1/e, and those that what was known before counts for.
_MEMORY, _PRIOR = 2000, 16
#: Where nothing was profiled: seconds of a prompt token and of a step. Their ratio is what orders requests.
_PREFILL_TOKEN, _DECODE_STEP = 1e-3, 0.03


class Runtime:
    """`prefill = a·s_in + b`, `decode = (c·s_in + d)·s_out`: seconds, for s_in prompt and s_out output tokens.

    Both lines are fitted to steps by least squares: a step's prefill (what it takes longer than one that only decodes)
    on its prompt tokens, the time of a token in a step that only decodes on the mean prompt length of its requests.
    They start at what was profiled, or at a guess. Requests run in batches: these are the times that one sees, not its
    share of them.
    """

    def __init__(self, costs: SwapCosts | None = None) -> None:
        self._start = (costs.prefill_token, costs.decode_step) if costs else (_PREFILL_TOKEN, _DECODE_STEP)
        self._prefill, self._decode = Regression(_MEMORY), Regression(_MEMORY)
        self.a, self.b, self.c, self.d = self._start[0], 0.0, 0.0, self._start[1]

    def observe(self, plan: Plan, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Take in a step, before its outcomes have been added to its requests."""
        decoding = prompts = produced = prefilled = 0
        for work, outcome in zip(plan.work, outcomes, strict=True):
            if work.request.decoding:
                decoding += 1
                prompts += work.request.prompt_len
                produced += len(outcome.tokens)
            else:
                prefilled += work.count
        if prefilled:
            usual = self.c * prompts / decoding + self.d if decoding else 0.0
            self._prefill.observe(prefilled, max(0.0, seconds - usual))
            self.a, self.b = _fitted(self._prefill, self._start[0], 0.0)
        elif produced:
            self._decode.observe(prompts / decoding, seconds * decoding / produced)
            self.c, self.d = _fitted(self._decode, 0.0, self._start[1])

    def remaining(self, request: Request) -> float:
        """Seconds until the request ends once it runs, by its predicted length; at least those of one more token."""
        left = max(1.0, request.expected_len - request.output_len)
        seconds = (self.c * request.prompt_len + self.d) * left
        return seconds if request.output_len else seconds + self.a * request.prompt_len + self.b


def _fitted(line: Regression, slope: float, offset: float) -> tuple[float, float]:
    """The line, its start counting for `_PRIOR` observations; neither is negative."""
    share = line.count / (line.count + _PRIOR)
    found = line.slope
    slope += share * (max(0.0, slope if found is None else found) - slope)
    offset += share * (max(0.0, line.y - slope * line.x) - offset)
    return slope, offset
