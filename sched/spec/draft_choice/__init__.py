"""Draft choice: which of several drafters drafts for which request (SPIN §IV). One policy per file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.sched.config import LbssSettings
from jaxspec.sched.spec.draft_choice.choice import DraftChoice, SwitchCost, Unlearned
from jaxspec.sched.spec.draft_choice.epsilon_greedy import EpsilonGreedy
from jaxspec.sched.spec.draft_choice.greedy import Greedy
from jaxspec.sched.spec.draft_choice.lbss import Lbss
from jaxspec.sched.spec.draft_choice.matching import match, match_shared
from jaxspec.sched.spec.draft_choice.single import Single

__all__ = [
    "DraftChoice",
    "EpsilonGreedy",
    "Greedy",
    "Lbss",
    "Single",
    "SwitchCost",
    "Unlearned",
    "build",
    "match",
    "match_shared",
]


def build(
    name: str,
    drafters: int,
    limits: Sequence[int],
    sizes: Sequence[float],
    rng: np.random.Generator,
    lbss: LbssSettings,
    epsilon: float,
) -> DraftChoice:
    """The policy `name` ("single", "greedy", "epsilon_greedy" or "lbss") for `drafters` drafters.

    `limits` are their batch limits B_j, `sizes` their sizes in any unit. Raises `ValueError` for an unknown name, and
    where a limit or size is missing.
    """
    if not drafters == len(limits) == len(sizes) > 0:
        raise ValueError(f"{drafters} drafters, but {len(limits)} limits and {len(sizes)} sizes")
    match name:
        case "single":
            return Single(limits)
        case "greedy":
            return Greedy(limits, sizes)
        case "epsilon_greedy":
            return EpsilonGreedy(limits, rng, epsilon)
        case "lbss":
            return Lbss(limits, rng, lbss)
        case _:
            raise ValueError(f"unknown draft choice {name!r}")
