"""Whether drafting pays, by what steps really gave and took.

The tree policy and the depth controllers decide by estimates: acceptance rates, profiled times, the host's usual
overhead. This is the check on them. While drafts are allowed, it adds up the time that they save against plain
decoding; if they lose time, they are off for some steps, twice as long each time, and then tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

#: Steps over which savings are averaged, and after which a trial is judged.
_STEPS, _TRIAL = 48, 32
#: Smallest mean saving per step, as a share of a plain step's time, with which drafts stay allowed, and the standard
#: errors by which a mean has to be below it.
_LEAST_SAVING, _SURE = -0.005, 2.0
#: Steps without drafts after a first failure, and at most.
_OFF, _MOST_OFF = 256, 4096
#: A step that takes this many times as long as a plain one tells of a pause of the machine, not of drafts.
_PAUSE = 5.0


@dataclass(slots=True)
class Payoff:
    """Allows drafts or not, for one range of numbers of decoding requests."""

    #: Mean share of a plain step's time saved per step, mean square of it, and the steps that they are over.
    saving: float = 0.0
    square: float = 0.0
    steps: int = 0
    #: Steps without drafts that are left, and how many the next failure costs.
    off: int = 0
    penalty: int = _OFF
    #: Steps without drafts so far, because of this.
    skipped: int = 0

    def allows(self) -> bool:
        """Whether the step that begins may draft."""
        allowed = not self.off
        self.off = max(0, self.off - 1)
        self.skipped += not allowed
        return allowed

    def observe(self, tokens: int, requests: int, seconds: float, plain: float) -> None:
        """A step that might draft gave `requests` requests `tokens` new tokens in `seconds`; without drafts it would
        have given each one and taken `plain` seconds."""
        if seconds > _PAUSE * plain * tokens / requests:
            return
        saved = tokens / requests - seconds / plain
        self.steps += 1
        count = min(self.steps, _STEPS)
        self.saving += (saved - self.saving) / count
        self.square += (saved**2 - self.square) / count
        if self.steps < _TRIAL:
            return
        error = sqrt(max(0.0, self.square - self.saving**2) / count)
        if self.saving + _SURE * error < _LEAST_SAVING:
            self.off, self.penalty = self.penalty, min(2 * self.penalty, _MOST_OFF)
            self.saving, self.square, self.steps = 0.0, 0.0, 0
        elif self.steps == 2 * _TRIAL:
            self.penalty = _OFF
