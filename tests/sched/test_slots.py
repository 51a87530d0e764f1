"""The registry of policies: what it accepts, and that everything registered can be built."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from jaxspec.config import EngineConfig
from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.length.distribution import LengthDistribution
from jaxspec.sched.order.order import Order
from jaxspec.sched.slots import ORDERS, PREDICTORS, SLOTS, TREES, Slot, SlotContext
from jaxspec.sched.timing import ResponseTimes, Runtime, StepTimes


def test_every_policy_can_be_built_from_its_defaults() -> None:
    for slot in SLOTS:
        for name in slot.names:
            config = PolicyConfig.model_validate({slot.setting: name})
            context = SlotContext(
                config, 4, PagePool(8, 4), times=StepTimes({1: 0.01}), runtime=Runtime(),
                lengths=LengthDistribution(), responses=ResponseTimes(4),
            )  # fmt: skip
            if slot.setting != "draft_choice":  # they need drafters
                slot.build(context)


def test_every_predictor_that_reads_prompts_has_a_builder() -> None:
    readers = [PREDICTORS[name].reader for name in PREDICTORS.names]
    assert all(callable(resolve_name(reader)) for reader in readers if reader)


def test_policies_are_registered_while_the_settings_are_built_and_in_the_slots_package() -> None:
    with pytest.raises(ValueError, match=r"order: late must be in a module of jaxspec\.sched\.order"):
        ORDERS.register("late")(Order)
    with pytest.raises(
        ValueError, match=r"two policies are called sjf, in jaxspec\.sched\.order\.sjf and jaxspec\.sched\.order\.order"
    ):
        ORDERS.register("sjf")(Order)
    other: Slot[Order] = Slot("order", "jaxspec.sched.kv")
    with pytest.raises(ValueError, match="order: astray must be in a module"):
        other.register("astray")(Order)


def test_no_section_has_the_name_of_another_setting() -> None:
    sections = [name for slot in SLOTS for name in slot.section_types]
    assert len(sections) == len(set(sections))
    assert not {*sections} & {*EngineConfig.__annotations__}


def test_a_policy_that_refuses_its_settings_is_named() -> None:
    config = PolicyConfig(tree="adaserve")
    with pytest.raises(ValueError, match="tree: adaserve: it needs step times"):
        TREES.build(SlotContext(config, 1))
