"""Continuous batching, and none at all."""

from __future__ import annotations

from jaxspec.sched.batching.batching import Batching
from jaxspec.sched.slots import BATCHINGS, SlotContext


@BATCHINGS.register("continuous")
class Continuous(Batching):
    """A finished request is replaced in the next step."""

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> Continuous:
        return cls(context.max_num_seqs)


@BATCHINGS.register("none")
class OneByOne(Batching):
    """No batching: one request at a time."""

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> OneByOne:
        return cls(1)
