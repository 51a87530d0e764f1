"""A draft choice that changes drafters in every step, with drafters on the target's device or on their own.

Run as a script, it checks on two devices (forced host devices suffice) that requests get the same tokens as without
drafts, for several placements of drafters and numbers of micro-batches, and for groups of requests in turns. It needs a
process of its own because the number of devices is fixed once JAX is in use.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import jax

from helpers import tiny
from helpers.generation import check_clean
from helpers.tiny_drafters import conditioned
from jaxspec import LLM, SamplingParams
from jaxspec.draft import registry as drafters
from jaxspec.models.load import LoadedModel
from jaxspec.models.load.weights import Weights
from jaxspec.sched.request import Request
from jaxspec.sched.spec.draft_choice.choice import DraftChoice, SwitchCost

SIZES: Mapping[str, Any] = dict(
    page_size=16, max_num_seqs=4, token_buckets=[16], compilation_cache_dir="", max_num_batched_tokens=16,
    kv_cache_tokens=2048, max_model_len=128,
)  # fmt: skip


def load(name: str, target: LoadedModel) -> tuple[Any, Weights]:
    """Stands in for `registry.load` with the drafters `conditioned` and `perfect`."""
    return conditioned(target) if name == "conditioned" else (target.config, drafters.whole(target))


def start(**more: Any) -> LLM:
    with patch.object(drafters, "load", load):
        return tiny.llm(**{**SIZES, "draft": ["ngram", "conditioned", "perfect"], **more})


class Switching(DraftChoice):
    """Every request changes its drafter after `slots` slots."""

    def __init__(self, drafters: int, slots: int = 1) -> None:
        self._drafters, self._slots, self._seen = drafters, slots, dict[str, int]()
        self.tokens = 0

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        assert all(cost(r, j) >= 0 for r in requests for j in range(self._drafters))
        return [self._at(r, 0) for r in requests]

    def _at(self, request: Request, later: int) -> int:
        return (self._seen.get(request.id, 0) + later) // self._slots % self._drafters

    def observe(self, request: Request, drafter: int | None, tokens: int, seconds: float) -> None:
        assert drafter == self._at(request, 0) and tokens > 0 and seconds > 0
        self._seen[request.id] = self._seen.get(request.id, 0) + 1
        self.tokens += tokens

    def ahead(self, request: Request) -> int | None:
        return self._at(request, 1)

    def ended(self, request: Request) -> None:
        self._seen.pop(request.id, None)


def switch(llm: LLM, slots: int = 1) -> Switching:
    """Install `Switching` as the draft choice of this engine."""
    speculator = llm.engine.speculator
    speculator.assign_by(choice := Switching(len(speculator.drafters), slots))
    return choice


def main() -> None:
    assert len(jax.devices()) == 2
    texts = [[7, 8, 9, 7, 8], list(range(40)), [3] * 17, [200, 1, 5], list(range(90, 120))]
    asked = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
    ]
    each = [asked[i % 2] for i in range(len(texts))]

    def answers(llm: LLM) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(texts, each)]

    with tiny.llm(draft=[], **SIZES) as llm:
        plain = answers(llm)
    one, both = {"perfect": 1}, {"conditioned": 1, "perfect": 1}
    tight = {"kv_cache_tokens": 160, "memory": "swap", "max_num_seqs": 3}
    for devices, parts, tree, more in (
        (both, None, "chain", {}),
        (one, 3, "auto", {"draft": ["perfect"]}),
        (both, 2, "chain", tight),
        ({}, 2, "auto", {}),
    ):
        with start(draft_devices=devices, micro_batches=parts, tree=tree, draft_choice="single", **more) as llm:
            engine, models = llm.engine, [name for name in llm.engine.config.draft if name != "ngram"]
            assert [p.what for p in engine.profiled] == ["step", *(f"rounds of {name}" for name in models)]
            swapped = [name for name in models if name not in devices]
            assert len(engine.loop.host._owners) == 1 + len(swapped), "drafters elsewhere are not swapped"
            choice = switch(llm, 2)
            assert answers(llm) == answers(llm) == plain, (devices, parts, tree)
            stats = llm.engine.stats()
            assert choice.tokens > 300, stats
            # auto drafts where that is faster, which is seldom with so small a model
            assert stats.accepted_tokens > 20 or tree == "auto", stats
            assert stats.compilations_after_warmup == 0, stats
    for tree, more in (
        ("chain", {"draft": ["perfect"]}),
        ("auto", {"draft": ["suffix", "perfect"]}),
        ("chain", {"draft": ["perfect"], **tight, "order": "las", "las": {"quantum_ms": 0.0}}),
    ):
        with start(draft_devices=one, draft_turns=True, tree=tree, **more) as llm:
            turns, launch = 0, llm.engine.loop.launcher.launch

            def launched(*step: Any, launch: Any = launch, llm: LLM = llm) -> None:
                nonlocal turns
                turns += bool(llm.engine.loop._under_way)
                launch(*step)

            with patch.object(llm.engine.loop.launcher, "launch", launched):
                assert answers(llm) == answers(llm) == plain, ("in turns", tree)
            assert turns > 10, "a group is drafted while another is verified"
            stats = llm.engine.stats()
            assert stats.accepted_tokens > 20 or tree == "auto", stats
            assert stats.compilations_after_warmup == 0, stats
            check_clean(llm)
    with start(draft_devices=one, draft=["perfect"], tree="chain") as llm:  # turns where they pay, which may change
        assert answers(llm) == answers(llm) == plain
        check_clean(llm)
    print("same tokens")


if __name__ == "__main__":
    sys.exit(main())
