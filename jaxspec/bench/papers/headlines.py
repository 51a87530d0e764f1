"""Headlines of the papers: published number, ours, and whether it is met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxspec.bench.estimates import interval
from jaxspec.bench.table import TIMES, UNKNOWN, Form, markdown, shown

MET, ON_AVERAGE, IN_PART, MISSED = "met", "met on average", "met in part", "not met"
NOT_RUN, TOO_FEW = "not run", "too few seeds"
#: With fewer seeds there is no verdict: the interval is too wide to say anything.
MIN_SEEDS = 5


@dataclass(frozen=True, slots=True)
class Headline:
    """A number that a paper reports, and the same measured here.

    simulated, engine: (mean, low, high) as in `Estimate`; None: not measured. seeds: how many the simulated mean is of.
    because: why it is missed, as found by changing that and measuring again; shown unless it is met. only: what the
    number is reached only with, far from the paper's conditions or at the price of another headline; such a headline is
    met in part at most. at_most: whether smaller is better.
    """

    what: str
    published: float
    simulated: Sequence[float] | None
    engine: Sequence[float] | None = None
    form: Form = TIMES
    because: str = ""
    only: str = ""
    at_most: bool = False
    seeds: int | None = field(kw_only=True)

    @property
    def verdict(self) -> str:
        """`met`: the simulated mean and its whole 95 % interval reach the published number; `met on average`: the mean
        does, but not the interval's other end. `met in part`: only the interval's end does, or see `only`."""
        if self.simulated is None:
            return NOT_RUN
        if (self.seeds or 0) < MIN_SEEDS:
            return TOO_FEW
        mean, *ends = map(self._reaches, self.simulated)
        if not mean:
            return IN_PART if any(ends) else MISSED
        return IN_PART if self.only else MET if all(ends) else ON_AVERAGE

    @property
    def explained(self) -> str:
        """The verdict, and why if it is not met."""
        if self.simulated is None or self.verdict not in (IN_PART, MISSED):
            return self.verdict
        reason = self.only if self._reaches(self.simulated[0]) else self.because
        return f"{self.verdict}, because {reason}" if reason else f"{self.verdict}; cause not found"

    def _reaches(self, value: float) -> bool:
        return value <= self.published if self.at_most else value >= self.published


def table(headlines: Iterable[Headline]) -> str:
    """The headlines of one page."""
    return markdown(
        ([h.what, *_numbers(h), h.explained] for h in headlines), "headline", "paper", "simulated", "engine", "verdict"
    )


def index(papers: Iterable[tuple[str, str, Sequence[Headline]]]) -> str:
    """The headlines of all papers, given as (title, command, headlines)."""
    rows = ([title, h.what, *_numbers(h), h.verdict, command] for title, command, found in papers for h in found)
    return markdown(rows, "paper", "headline", "published", "simulated", "engine", "verdict", "command")


def lines(headlines: Iterable[Headline]) -> list[str]:
    """The headlines for the terminal, one line each."""
    width = max(map(len, (MET, ON_AVERAGE, IN_PART, MISSED, NOT_RUN, TOO_FEW)))
    out = []
    for h in headlines:
        numbers = zip(("paper", "simulated", "engine"), _numbers(h), strict=True)
        text = ", ".join(f"{name} {number}" for name, number in numbers if number != UNKNOWN)
        out.append(f"{h.verdict:<{width}}  {h.what}: {text}")
    return out


def _numbers(headline: Headline) -> list[str]:
    form = interval(headline.form)
    return [shown(headline.published, headline.form), shown(headline.simulated, form), shown(headline.engine, form)]
