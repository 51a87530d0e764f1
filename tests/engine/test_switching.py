"""Requests that change drafters write what they would write without (design §4)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import quick_xla, tiny
from helpers.generation import check_clean, params, prompts, tokens_of
from helpers.paths import TESTS
from helpers.switching import SIZES, start, switch
from jaxspec import LLM
from jaxspec.config import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with tiny.llm(draft=[], **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LLM]]:
    """Changing in every step, with room and without, in one piece and in two, and as the policies have it."""
    tight = {"kv_cache_tokens": 80, "max_num_batched_tokens": 8, "max_model_len": 72}
    with ExitStack() as stack:
        begin = lambda **more: stack.enter_context(start(**more))  # noqa: E731
        constant = [
            begin(tree="chain", draft_choice="single"),
            begin(tree="fixed", draft_choice="single", **tight),
            begin(tree="chain", draft_choice="single", micro_batches=2),
        ]
        for llm in constant:
            switch(llm)
        yield [
            *constant,
            begin(draft_choice="lbss", draft_limits={"perfect": 1}, tree="chain"),
            begin(draft_choice="epsilon_greedy", draft_limits={"ngram": 1, "conditioned": 1, "perfect": 1}),
            begin(draft_choice="greedy", tree="adaserve", slo={"tpot_ms": 0.01}),
        ]


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_choice_of_drafters_gives_the_same_tokens(plain: LLM, engines: list[LLM], data: Any) -> None:
    texts = [t[:40] for t in data.draw(st.lists(prompts, min_size=1, max_size=5))]
    each = [data.draw(params) for _ in texts]
    expected = [tokens_of(o) for o in plain.generate(texts, each)]
    for llm in engines:
        assert [tokens_of(o) for o in llm.generate(texts, each)] == expected
        check_clean(llm)


def test_on_devices_of_their_own_in_micro_batches() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "helpers.switching"], capture_output=True, text=True, timeout=900, cwd=TESTS,
        env=quick_xla.environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same tokens" in done.stdout


def test_settings_that_name_what_is_not_there() -> None:
    for settings_, message in (
        ({"draft_devices": {"perfect": 1}}, "draft_devices.perfect: no device 1, there are 1"),
        ({"draft_devices": {"other": 0}}, "draft_devices: no draft model 'other'"),
        ({"draft_limits": {"other": 2}}, "draft_limits: no drafter other .*ngram, conditioned, perfect"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(**settings_)
