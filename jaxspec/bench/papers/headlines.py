"""Headlines of the papers: published number, ours, and whether it is met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxspec.bench.papers.estimates import interval
from jaxspec.bench.table import TIMES, Form, markdown, shown

MET, IN_PART, MISSED = "met", "met in part", "not met"


@dataclass(frozen=True, slots=True)
class Headline:
    """A number that a paper reports, and the same measured here.

    simulated, engine: (mean, low, high) as in `Estimate`; None: not measured. because: why it is missed, as found by
    changing that and measuring again; shown unless it is met. at_most: whether smaller is better.
    """

    what: str
    published: float
    simulated: Sequence[float] | None
    engine: Sequence[float] | None = None
    form: Form = TIMES
    because: str = ""
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """`met`: the simulated mean reaches the published number. `met in part`: its 95 % interval does."""
        if self.simulated is None:
            return "not run"
        mean, low, high = (-x for x in self.simulated) if self.at_most else self.simulated
        goal = -self.published if self.at_most else self.published
        return MET if mean >= goal else IN_PART if max(low, high) >= goal else MISSED

    @property
    def explained(self) -> str:
        """The verdict, and why if it is not met."""
        missed = self.verdict in (IN_PART, MISSED)
        return f"{self.verdict}, because {self.because}" if missed and self.because else self.verdict


def table(headlines: Iterable[Headline]) -> str:
    """The headlines of one page."""
    return markdown(
        ([h.what, *_numbers(h), h.explained] for h in headlines), "headline", "paper", "simulated", "engine", "verdict"
    )


def index(papers: Iterable[tuple[str, str, Sequence[Headline]]]) -> str:
    """The headlines of all papers, given as (title, command, headlines)."""
    rows = ([title, h.what, *_numbers(h), h.verdict, command] for title, command, found in papers for h in found)
    return markdown(rows, "paper", "headline", "published", "simulated", "engine", "verdict", "command")


def _numbers(headline: Headline) -> list[str]:
    form = interval(headline.form)
    return [shown(headline.published, headline.form), shown(headline.simulated, form), shown(headline.engine, form)]
