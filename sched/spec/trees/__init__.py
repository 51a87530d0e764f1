"""Tree policies: which of a drafter's candidates the target verifies. One policy per file."""

from jaxspec.sched.spec.trees.adaserve import AdaServe, optimal
from jaxspec.sched.spec.trees.candidates import Candidates, Draft
from jaxspec.sched.spec.trees.chain import Chain
from jaxspec.sched.spec.trees.equal_greedy import EqualGreedy
from jaxspec.sched.spec.trees.fixed import Fixed
from jaxspec.sched.spec.trees.global_greedy import GlobalGreedy
from jaxspec.sched.spec.trees.policy import TreePolicy
from jaxspec.sched.spec.trees.preorder import preorder
from jaxspec.sched.spec.trees.sampled import SampledTree

__all__ = [
    "AdaServe",
    "Candidates",
    "Chain",
    "Draft",
    "EqualGreedy",
    "Fixed",
    "GlobalGreedy",
    "SampledTree",
    "TreePolicy",
    "optimal",
    "preorder",
]
