"""Failures that are injected into an engine: of the device, the host, drafters, and the length predictor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import jax
import numpy as np

from jaxspec.bench.chaos.scenario import CONTEXT, Asked
from jaxspec.draft.model_drafter import ModelDrafter
from jaxspec.engine.engine import Engine
from jaxspec.predict.service import NoPredictions
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.spec.drafter import Drafter
from jaxspec.step.packing import Packed, Tree
from jaxspec.step.runner import PendingStep


class Injected(RuntimeError):
    """A failure that the harness has made."""


class Clock:
    """Seconds that pass only when the time is asked for, `tick` each, or with `advance`."""

    def __init__(self, tick: float = 5e-4) -> None:
        self.now, self.tick = 1000.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Faults:
    """Wraps an engine's parts so that what `arm` names fails once, at its next use."""

    #: Where a step can fail.
    KINDS = ("plan", "carry out", "draft", "read draft", "launch", "lose pool", "read", "update")
    #: The same with draft models on a device of their own.
    OWN_DEVICE = ("lose draft pool", "precompute")

    def __init__(self, engine: Engine, passes: Random) -> None:
        """`passes`: for how many micro-batches of a step succeed before one fails."""
        self.injected = Counter[str]()
        own_device = [drafter for drafter in engine.speculator.drafters if drafter.own_device]
        self.kinds = self.KINDS + (self.OWN_DEVICE if own_device else ())
        self._passes, self._micro_batches = passes, bool(own_device)
        #: Seed of a poisonous request -> committed positions from which on its steps fail.
        self._poisonous: dict[tuple[int, int], int] = {}
        self._armed: str | None = None
        loop = engine.loop
        runner = loop.model_runner
        self._wrap(loop.scheduler, "plan", "plan", after=True)
        self._wrap(loop.scheduler, "update", "update")
        self._wrap(loop.host, "carry_out", "carry out")
        self._wrap(runner, "execute", "launch")
        execute, pack = runner.execute, runner.pack

        def executed(packed: Packed, before: PendingStep | None = None, chains: Any = None) -> PendingStep:
            if self._due("lose pool"):
                for leaf in jax.tree.leaves(runner.kv_cache):
                    leaf.delete()
                raise Injected("lose pool")
            pending = execute(packed, before, chains)
            if self._due("read"):
                pending.wait = _failing("read")  # type: ignore[method-assign]
            return pending

        def packed(trees: Sequence[Tree]) -> Packed:
            if any(tree.committed >= self._poisonous.get(tree.sampling.seed, CONTEXT) for tree in trees):
                self.injected["poison"] += 1
                raise Injected("poison")
            return pack(trees)

        runner.execute, runner.pack = executed, packed  # type: ignore[method-assign]
        for drafter in engine.speculator.drafters:
            drafter.propose = self._proposing(drafter)  # type: ignore[method-assign]
            if drafter.own_device:
                self._wrap(drafter, "precompute_kv", "precompute")

    def poison(self, asked: Asked, tokens: int, number: int) -> SamplingParams:
        """Parameters with a seed of their own, by which the steps of this request fail after `tokens` output tokens."""
        params = asked.params.with_seed(2**63 + number)
        self._poisonous[number, 2**31] = len(asked.prompt) + tokens - 1
        return params

    def arm(self, kind: str | None) -> None:
        """The next use of this kind fails; None: nothing does."""
        self._armed = kind

    def _due(self, kind: str) -> bool:
        if self._armed != kind or (self._micro_batches and self._passes.random() < 0.4):
            return False
        self._armed = None
        self.injected[kind] += 1
        return True

    def _wrap(self, part: Any, method: str, kind: str, after: bool = False) -> None:
        original = getattr(part, method)

        def wrapped(*args: Any, **kw: Any) -> Any:
            if not after and self._due(kind):
                raise Injected(kind)
            found = original(*args, **kw)
            if after and self._due(kind):
                raise Injected(kind)
            return found

        setattr(part, method, wrapped)

    def _proposing(self, drafter: Drafter) -> Callable[..., Any]:
        propose = drafter.propose

        def wrapped(*args: Any, **kw: Any) -> Any:
            if self._due("draft"):
                raise Injected("draft")
            if isinstance(drafter, ModelDrafter) and drafter.own_device and self._due("lose draft pool"):
                for leaf in jax.tree.leaves(drafter.runner.kv_cache):
                    leaf.delete()
                raise Injected("lose draft pool")
            proposal = propose(*args, **kw)
            return _failing("read draft") if self._due("read draft") else proposal

        return wrapped


def _failing(kind: str) -> Callable[[], Any]:
    def fail() -> np.ndarray:
        raise Injected(kind)

    return fail


class WildPredictions(NoPredictions):
    """A length predictor that is late, wrong by orders of magnitude, or silent. It runs in the engine's own thread, so
    that a run can be repeated exactly."""

    name = "wild"

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random, self._waiting = random, dict[str, int]()

    def add(self, request_id: str, prompt_ids: Sequence[int], at_once: bool = True) -> None:
        if self._random.random() < 0.8:
            self._waiting[request_id] = self._random.choice((0, 1, 5, 40))

    def apply(self, predicted: Callable[[str, float, float], bool], now: float) -> None:
        due = [name for name, turns in self._waiting.items() if turns <= 0]
        for name in self._waiting:
            self._waiting[name] -= 1
        for name in due:
            del self._waiting[name]
            here = predicted(name, self._random.choice((1.0, 3.0, 12.5, 1e6)), now)
            self.counts.made, self.counts.late = self.counts.made + 1, self.counts.late + (not here)
