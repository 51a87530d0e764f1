"""The interface of a tree policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Self

import numpy as np
import numpy.typing as npt

from jaxspec.sched.plan import Lookahead
from jaxspec.sched.request import Request
from jaxspec.sched.slots import Need, Policy, SlotContext
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.timing import StepTimes

#: Most levels of a draft tree.
DEPTH = 8
#: Most draft nodes of one request in a step.
MOST_NODES = 32
#: With `prompts_in_budget`: the share of what decoding requests leave of the verify budget that prompts may take, and
#: the least share of the whole budget, so that they progress. In the simulations of AdaServe's experiments, half of it
#: made prompts wait several times as long for no more SLOs kept; nearly all of it left strict requests too few drafts.
_PROMPT_SHARE, _LEAST_PROMPT_SHARE = 0.75, 0.25
#: Tokens within the verify budget count as nearly free if a step of that size takes at most this many times as long as
#: one of one token. It is about 1 where the weights are read while the device computes (GPU), and up to 1.5 because a
#: profiled budget is rounded up to a bucket; it is 2 where both times add up.
_PLATEAU = 1.75


@dataclass(frozen=True, slots=True)
class StepCandidates:
    """The candidates of R requests of a step, and what bounds their selection. Iterates over (tree, limit).

    limits        `[R]` maximum draft nodes of each request; below 1: no draft
    room          maximum draft nodes of all requests together: what fits in the step
    budget        draft nodes that the verify budget leaves (`TreePolicy.within`); may be negative
    needs         `[R]` tokens that each request must get from this step to meet its SLO; -inf without one, and for a
                  policy that does not need SLOs
    other_tokens  tokens of the step that are not drafts
    context       committed positions that the step reads
    overhead      seconds of the host that drafts add to a step, however few they are
    """

    forest: Forest
    limits: Sequence[int]
    room: int
    budget: int
    needs: Sequence[float]
    other_tokens: int
    context: int = 0
    overhead: float = 0.0

    def __iter__(self) -> Iterator[tuple[Candidates, int]]:
        return zip(self.forest, self.limits, strict=True)


class TreePolicy(Policy):
    """Selects, for all requests of a step at once, which candidates the target verifies."""

    #: Whether nodes are ranked by observed acceptance rates instead of the drafter's probabilities.
    calibrated: bool = False
    #: Widest beam that it uses; None: as wide as the drafters offer.
    max_width: int | None = None
    #: Shape in which draft models grow every tree: how many of its likeliest children each node gets, by level.
    #: Empty: beams, which are the likeliest paths. Programs are compiled for the class's value.
    expansion: tuple[int, ...] = ()
    #: Whether it shares `StepCandidates.room` among the requests, by the value of their nodes. If not, `limits` are
    #: even shares of it.
    shares_room: bool = False
    #: Whether prompts are computed within the verify budget while requests decode, on devices whose steps of that size
    #: are hardly longer than those of one token.
    prompts_in_budget: bool = False
    #: Whether it selects from one tree of the candidates of several drafters; if not, from those of one drafter.
    merges: bool = True
    #: Whether a chain may be verified whole, without a look at its probabilities, so that its step can be launched
    #: before the host has read it (`jaxspec.sched.spec.ahead`).
    whole_chains: bool = False
    #: Whether `draft_nodes` sets the nodes of a step.
    shares_nodes: bool = False
    #: With `acceptance: rejection`: children drawn for each node, by level; `SampledTree` then selects all of them.
    #: None: rejection sampling is not possible, because it is biased if the selection depends on the tokens drawn.
    sampled_widths: tuple[int, ...] | None = None

    @property
    def adaptive(self) -> bool:
        """Whether each drafter's `DepthController` picks depth and width; if not, they are the configured ones."""
        return False

    def largest(self, levels: int) -> Lookahead:
        """The bounds on a tree of at most `levels` levels: with an `expansion`, its levels and its nodes."""
        if not self.expansion:
            return Lookahead(MOST_NODES, levels)
        of_level: list[int] = list(accumulate(self.expansion[:levels], mul))
        return Lookahead(min(MOST_NODES, sum(of_level)), len(of_level))

    @property
    def by_budget(self) -> bool:
        """Whether drafts keep to the verify budget: depth, width, and no drafts once other tokens fill it."""
        return False

    def within(self, budget: int) -> int:
        """Draft nodes of a step whose verify budget leaves `budget`."""
        return budget

    def select(self, step: StepCandidates) -> list[npt.NDArray[np.bool_]]:
        """One `[n]` mask per request, closed under parents and with at most `limits[i]` nodes.

        Every policy keeps to the limits, and to `room` if it `shares_room`; it may ignore the other bounds.
        """
        raise NotImplementedError

    def prompt_limit(self, decoding: Sequence[Request], verify_budget: int, times: StepTimes) -> int | None:
        """Most prompt tokens of a step in which these requests decode; None: no limit.

        With `prompts_in_budget` there is one, but only where tokens within the verify budget are nearly free. Where
        each token makes the step longer, as on a CPU, small chunks delay decoding requests as much in total as large
        ones, and only make prompts wait.
        """
        if not (self.prompts_in_budget and self.by_budget):
            return None
        context = sum(r.computed for r in decoding)
        if times.of(verify_budget, context) > _PLATEAU * times.of(1, context):
            return None
        blind = Need.SLOS not in self.needs
        if not any(blind or r.slo.tpot is not None for r in decoding):
            return None
        return max(1, int(_PROMPT_SHARE * (verify_budget - len(decoding))), int(_LEAST_PROMPT_SHARE * verify_budget))

    def late(self, decoding: Sequence[Request], now: float, seconds: float, max_nodes: int) -> Sequence[Request]:
        """Requests to draft for in a step in which drafts do not pay, or in which prompts fill the verify budget.

        The step begins now and takes `seconds` seconds without drafts; the verify budget leaves `max_nodes` nodes.
        """
        return ()


@dataclass(frozen=True, slots=True)
class SharedNodes(TreePolicy):
    """Base of policies that share a number of draft nodes among all requests.

    `nodes`: that number, roots not included; None: what the verify budget leaves. Raises `ValueError` if it is
    negative.
    """

    nodes: int | None = None
    calibrated: bool = False
    prompts_in_budget: bool = False
    shares_nodes = True

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < 0:
            raise ValueError(f"nodes must not be negative, got {self.nodes}")

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> Self:
        config = context.config
        return cls(config.draft_nodes, config.draft_calibration, config.prompts_in_budget)

    @property
    def by_budget(self) -> bool:
        return self.nodes is None

    def within(self, budget: int) -> int:
        return budget if self.nodes is None else self.nodes

    def sharable(self, step: StepCandidates) -> int:
        """Draft nodes that the step's requests share."""
        return max(0, min(step.room, step.budget, step.room if self.nodes is None else self.nodes))
