"""Which of several drafters drafts for which request (SPIN §IV): one policy a file."""

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
    """The policy "single", "greedy", "epsilon_greedy" or "lbss" for so many drafters, with the batch limits B_j and
    sizes (in any unit) of each. Raises `ValueError` for other names, and where a limit or size is missing."""
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
            raise ValueError(f"no way to choose drafters is called {name!r}")
