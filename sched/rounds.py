"""What a round of drafting and verifying takes."""

from __future__ import annotations

from jaxspec.sched.regression import Regression

#: Rounds after which an observation weighs 1/e.
_MEMORY = 1000


class RoundCost:
    """Seconds of a round as `n · draft + verify`, n tokens drafted; what is not given is learned from the rounds.

    Learned by least squares over recent rounds. As long as all draft the same number, all time counts as `verify`,
    which is right for that number.
    """

    def __init__(self, draft: float | None = None, verify: float | None = None) -> None:
        self._given = draft, verify
        self._line = Regression(_MEMORY)

    def observe(self, n: int, seconds: float) -> None:
        self._line.observe(n, seconds)

    @property
    def draft(self) -> float:
        """T_ssm: seconds a drafted token."""
        return self._given[0] if self._given[0] is not None else max(0.0, self._line.slope or 0.0)

    @property
    def verify(self) -> float:
        """T_llm: seconds of a round beside its drafting."""
        line = self._line
        return self._given[1] if self._given[1] is not None else max(0.0, line.y - line.x * self.draft)

    def seconds(self, n: float) -> float:
        """Of a round that drafts n tokens."""
        return n * self.draft + self.verify
