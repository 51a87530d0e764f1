"""Slots: the decisions for which there are several policies, and the policies registered for each.

A policy registers its name and its settings where it is defined, and states what it needs:

    @ORDERS.register("priority", PrioritySettings)
    class Priority(Order):
        needs = frozenset({Need.PRIORITIES})

So a new policy is one new file in the slot's package: its name becomes a value of the slot's setting, and its settings
become a section of the same name. `jaxspec.sched.config` imports all modules of these packages to build the settings;
they cannot import it themselves, except for type checking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from jaxspec.sched.batching import Batching
    from jaxspec.sched.config import PolicyConfig
    from jaxspec.sched.kv.manager import KVCacheManager
    from jaxspec.sched.kv.page_pool import PagePool
    from jaxspec.sched.length import LengthSource
    from jaxspec.sched.length.distribution import LengthDistribution
    from jaxspec.sched.order.order import Order
    from jaxspec.sched.pace import Pace
    from jaxspec.sched.spec.draft_choice.choice import DraftChoice
    from jaxspec.sched.spec.drafter import Drafter
    from jaxspec.sched.spec.trees.policy import TreePolicy
    from jaxspec.sched.timing import ResponseTimes, Runtime, StepTimes, SwapCosts


class Section(BaseModel):
    """Settings of one policy, as a nested mapping. Immutable; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Need(Enum):
    """What a policy needs from the engine or from requests."""

    #: Seconds of a step by its size (`StepTimes`).
    STEP_TIMES = "step times"
    #: Execution time of a request (`Runtime`); the engine measures its start values.
    RUNTIME = "the runtime model"
    #: Predicted output lengths; without a predictor, max_tokens stands in.
    LENGTHS = "output lengths"
    PRIORITIES = "priorities"
    #: Latency SLOs: without any, the policy makes no difference.
    SLOS = "latency SLOs"
    HOST_MEMORY = "host memory"


@dataclass(frozen=True, slots=True)
class SlotContext:
    """What policies are built from. Parts that are None or empty are not available.

    The scheduler builds orders, batching, memory, pace and predictor, with pool and runtime model; `build_speculator`
    builds trees and draft choices, with drafters.
    """

    config: PolicyConfig
    #: Requests that run at once.
    max_num_seqs: int
    pool: PagePool | None = None
    #: Host pages that KV can be swapped to, and whether swapping preserves KV exactly.
    host_pages: int = 0
    exact_swap: bool = True
    #: Costs of swapping and recomputing.
    costs: SwapCosts | None = None
    times: StepTimes | None = None
    #: Estimates a request's execution time. It learns if a policy in use needs it.
    runtime: Runtime | None = None
    #: How output lengths are distributed.
    lengths: LengthDistribution | None = None
    #: How long requests have taken, waiting included.
    responses: ResponseTimes | None = None
    drafters: Sequence[Drafter] = ()


class Policy:
    """Base of all policies. `needs`: what it needs from the engine or from requests."""

    needs: ClassVar[frozenset[Need]] = frozenset()

    @classmethod
    def build(cls, settings: Any, context: SlotContext) -> Self:
        """Build the policy. `settings`: its section; None if it has none. Raises `ValueError` if they do not fit."""
        return cls()


P = TypeVar("P", bound=Policy)
C = TypeVar("C", bound=type[Policy])


class Slot(Generic[P]):
    """The policies of one slot by name. `setting` selects one; they are defined in the modules of `package`."""

    def __init__(self, setting: str, package: str) -> None:
        self.setting, self._package, self._loaded = setting, package, False
        self._policies: dict[str, type[P]] = {}
        #: Settings of the policies that have any, by name.
        self.section_types: dict[str, type[Section]] = {}

    def register(self, name: str, settings: type[Section] | None = None) -> Callable[[C], C]:
        """Class decorator: register a policy.

        Raises `ValueError` if the name is taken, if the class is not in the slot's package, and after `load`, when the
        settings have been built.
        """

        def add(policy: C) -> C:
            if name in self._policies:
                modules = f"{self._policies[name].__module__} and {policy.__module__}"
                raise ValueError(f"{self.setting}: two policies are called {name}, in {modules}")
            if self._loaded or not policy.__module__.startswith(f"{self._package}."):
                raise ValueError(f"{self.setting}: {name} must be in a module of {self._package}")
            self._policies[name] = policy  # type: ignore[assignment]
            if settings is not None:
                self.section_types[name] = settings
            return policy

        return add

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in alphabetical order of modules."""
        return tuple(self._policies)

    def __getitem__(self, name: str) -> type[P]:
        return self._policies[name]

    def selected(self, config: PolicyConfig) -> type[P]:
        """The class of the configured policy."""
        return self._policies[getattr(config, self.setting)]

    def section_of(self, config: PolicyConfig) -> Any:
        """The settings of the configured policy; None if it has none."""
        name = getattr(config, self.setting)
        return getattr(config, name) if name in self.section_types else None

    def build(self, context: SlotContext) -> P:
        """Build the configured policy. Raises `ValueError` naming it if its settings or the context do not fit."""
        policy = self.selected(context.config)
        try:
            if Need.STEP_TIMES in policy.needs and context.times is None:
                raise ValueError("it needs step times")
            return policy.build(self.section_of(context.config), context)
        except ValueError as error:
            raise ValueError(f"{self.setting}: {getattr(context.config, self.setting)}: {error}") from None

    def load(self) -> None:
        """Import all modules of the slot's package, which register their policies."""
        for module in iter_modules(import_module(self._package).__path__):
            import_module(f"{self._package}.{module.name}")
        self._loaded = True


ORDERS: Slot[Order] = Slot("order", "jaxspec.sched.order")
PREDICTORS: Slot[LengthSource] = Slot("predictor", "jaxspec.sched.length")
BATCHINGS: Slot[Batching] = Slot("batching", "jaxspec.sched.batching")
MEMORIES: Slot[KVCacheManager] = Slot("memory", "jaxspec.sched.kv")
PACES: Slot[Pace] = Slot("pace", "jaxspec.sched.pace")
DRAFT_CHOICES: Slot[DraftChoice] = Slot("draft_choice", "jaxspec.sched.spec.draft_choice")
TREES: Slot[TreePolicy] = Slot("tree", "jaxspec.sched.spec.trees")

SLOTS: tuple[Slot[Any], ...] = (ORDERS, PREDICTORS, BATCHINGS, MEMORIES, PACES, DRAFT_CHOICES, TREES)
