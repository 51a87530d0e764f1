"""How a request's draft tree is cut out of the candidates that a drafter proposed: one policy a file."""

from jaxspec.sched.trees.adaserve import AdaServe, optimal
from jaxspec.sched.trees.candidates import Candidates, Draft
from jaxspec.sched.trees.chain import Chain
from jaxspec.sched.trees.drawing import Drawing
from jaxspec.sched.trees.equal_greedy import EqualGreedy
from jaxspec.sched.trees.fixed import Fixed
from jaxspec.sched.trees.global_greedy import GlobalGreedy
from jaxspec.sched.trees.policy import Off, TreePolicy
from jaxspec.sched.trees.preorder import preorder

__all__ = [
    "AdaServe",
    "Candidates",
    "Chain",
    "Draft",
    "Drawing",
    "EqualGreedy",
    "Fixed",
    "GlobalGreedy",
    "Off",
    "TreePolicy",
    "optimal",
    "preorder",
]
