"""What drafts cost the host: its usual time in steps of each kind."""

from __future__ import annotations

from typing import NamedTuple

#: Weight of the newest observation, and the longest that counts (seconds): others are pauses.
_WEIGHT, _LONGEST = 0.05, 5e-3
#: Kinds of steps: without drafting, with drafting of which nothing is verified, with drafts.
PLAIN, UNUSED, DRAFTED = range(3)


class StepTook(NamedTuple):
    """A step in one micro-batch.

    seconds    from its beginning, or from the end of the step before where they overlap
    on_device  of these, on the target's device
    drafted    whether it verified any drafts
    overlaps   whether another step was launched while it ran, or it while another ran
    """

    seconds: float
    on_device: float
    drafted: bool
    overlaps: bool = False


class HostTimes:
    """Seconds of a step in which the device waits for the host, by kind of step; draft rounds do not count."""

    def __init__(self) -> None:
        self._usual: list[float | None] = [None, None, None]
        #: Whether steps without drafts, or with drafts that go ahead, are planned while the one before runs.
        self.overlapping = False

    def observe(self, kind: int, took: StepTook, rounds: float) -> None:
        """A step of this kind, of which draft rounds took `rounds` seconds."""
        # Where plain steps overlap, one that does not, after a step with drafts, is not what they would be without any.
        if kind == PLAIN and self.overlapping and not took.overlaps:
            return
        seconds, usual = min(max(took.seconds - took.on_device - rounds, 0.0), _LONGEST), self._usual[kind]
        self._usual[kind] = seconds if usual is None else usual + _WEIGHT * (seconds - usual)

    def of(self, kind: int) -> float | None:
        """Usual seconds of a step of this kind; None: not known yet."""
        known = self._usual[kind]
        return 0.0 if known is None and kind == PLAIN and self.overlapping else known

    @property
    def without_drafts(self) -> float:
        """Seconds of the host in a plain step; until one is known, of the most similar kind of step."""
        return next((s for kind in (PLAIN, UNUSED, DRAFTED) if (s := self.of(kind)) is not None), 0.0)

    def overhead(self, without: int) -> float:
        """Seconds that verifying drafts adds to a step of the kind `without`; 0 while not known."""
        drafted, other = self.of(DRAFTED), self.of(without)
        return 0.0 if other is None or drafted is None else max(0.0, drafted - other)
