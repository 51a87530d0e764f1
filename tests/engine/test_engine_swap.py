"""Swapping in the engine: with pools so small that everybody is preempted again and again, a request writes what it
writes alone, whatever the order, the drafters and the room on the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tiny
from helpers.generation import GREEDY, check_clean, params, prompts, tokens_of
from helpers.patience import PATIENCE
from helpers.tiny_drafters import conditioned, perfect
from jaxspec import LLM, SamplingParams
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.draft import registry as drafters
from jaxspec.outputs import OutputDelta

COMMON: dict[str, Any] = dict(page_size=16, max_num_seqs=4, token_buckets=[16], compilation_cache_dir="")
ROOMY: dict[str, Any] = dict(kv_cache_tokens=2048, max_num_batched_tokens=16, max_model_len=128, draft=[])
#: Room for little more than one long request on the device, and for a few on the host.
TIGHT: dict[str, Any] = dict(
    kv_cache_tokens=96, max_num_batched_tokens=8, max_model_len=72, memory="swap", swap_space=0.01
)
#: name -> (what replaces the drafter's weights, settings)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "in turn": (None, dict(draft=[])),
    "least service": (None, dict(draft=[], order="las", las={"quantum_ms": 1}, aging_ms=2000)),
    "alise": (None, dict(draft=["ngram"], order="alise", predictor="noisy_oracle", enable_prefix_caching=False)),
    "little room": (None, dict(draft=[], order="las", las={"quantum_ms": 1}, swap_space=4e-5)),
    "drafter": (
        perfect,
        dict(
            draft="truncated:1",
            tree="chain",
            draft_depth=4,
            order="las",
            las={"quantum_ms": 1},
            enable_prefix_caching=False,
        ),
    ),
    "conditioned": (conditioned, dict(draft=["ngram", "truncated:1"], order="alise", predictor="oracle")),
}


def start(kind: str, **more: Any) -> LLM:
    other, chosen = KINDS[kind]
    with pytest.MonkeyPatch.context() as patch:
        if other is not None:
            patch.setattr(drafters, "load", lambda name, target: other(target))
        return tiny.llm(**{**COMMON, **TIGHT, **chosen, **more})


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with tiny.llm(**COMMON, **ROOMY) as llm:
        yield llm


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLM]]:
    with ExitStack() as stack:
        yield {kind: stack.enter_context(start(kind)) for kind in KINDS}


def check_host(llm: LLM) -> None:
    check_clean(llm)
    stats = llm.engine.stats()
    assert (stats.swapped, stats.host_usage) == (0, 0)
    llm.engine.loop.scheduler.kv.host.check([])  # type: ignore[attr-defined]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_swapping_changes_no_token(plain: LLM, engines: dict[str, LLM], data: Any) -> None:
    texts = [t[:40] for t in data.draw(st.lists(prompts, min_size=1, max_size=7))]
    each = [data.draw(params) for _ in texts]
    expected = [tokens_of(o) for o in plain.generate(texts, each)]
    for llm in engines.values():
        assert [tokens_of(o) for o in llm.generate(texts, each)] == expected
        check_host(llm)


@pytest.mark.slow
def test_every_request_is_swapped_and_nothing_compiles(plain: LLM, engines: dict[str, LLM]) -> None:
    before = {kind: llm.engine.stats().compilations_after_warmup for kind, llm in engines.items()}
    texts = [list(range(i, i + 20)) for i in range(0, 80, 10)]
    expected = [tokens_of(o) for o in plain.generate(texts, replace(GREEDY, max_tokens=40))]
    for kind, llm in engines.items():
        outputs = llm.generate(texts, replace(GREEDY, max_tokens=40))
        assert [tokens_of(o) for o in outputs] == expected, kind
        stats = llm.engine.stats()
        assert stats.pages_swapped_out > 0 and stats.pages_swapped_in > 0 and stats.swaps > 0, kind
        assert stats.compilations_after_warmup == before[kind], kind
        assert not any(o.metrics.kv_quantized for o in outputs)
        if kind == "drafter":  # its KV comes back too: else it would be wrong
            counts = [o.metrics.speculation for o in outputs]
            assert sum(c.accepted for c in counts) == sum(c.proposed for c in counts) > 0
        check_host(llm)
    assert engines["little room"].engine.stats().swaps < engines["little room"].engine.stats().preemptions


@pytest.mark.slow
def test_cancelling_in_the_crowd_leaks_nothing(engines: dict[str, LLM]) -> None:
    for llm in engines.values():
        done, deltas = threading.Semaphore(0), {}

        def take(delta: OutputDelta, done: threading.Semaphore = done, deltas: dict[str, int] = deltas) -> None:
            deltas[delta.request_id] = deltas.get(delta.request_id, 0) + len(delta.token_ids)
            if delta.finish_reason is not None:
                done.release()

        ids = [llm.engine.submit(range(i, i + 20), replace(GREEDY, max_tokens=48), take) for i in range(12)]
        for i in (7, 0, 3, 9, 11):
            llm.engine.cancel(ids[i])
        for _ in ids:
            assert done.acquire(timeout=PATIENCE)
        assert all(deltas[ids[i]] == 48 for i in (1, 2, 4, 5, 6, 8, 10))
        check_host(llm)


@pytest.mark.slow
def test_int8_swaps_say_so() -> None:
    with start("least service", swap_dtype="int8") as llm:
        texts = [list(range(i, i + 20)) for i in range(0, 80, 10)]
        outputs = llm.generate(texts, replace(GREEDY, max_tokens=40))
        assert all(len(tokens_of(o)) == 40 for o in outputs)
        assert any(o.metrics.kv_quantized for o in outputs)
        assert llm.engine.stats().compilations_after_warmup == 0
        alone = llm.generate([texts[0]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0]
        assert not alone.metrics.kv_quantized and tokens_of(alone) == tiny.greedy(texts[0], 5)
        check_host(llm)


def test_settings_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"swap_space.*memory: swap"):
        EngineConfig.load(None, memory="swap", swap_space=0)
    for bad in (-1, float("nan"), "x"):
        with pytest.raises(ConfigError, match="swap_space"):
            EngineConfig.load(None, swap_space=bad)
    with pytest.raises(ConfigError, match="swap_dtype"):
        EngineConfig.load(None, swap_dtype="int4")
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        EngineConfig.load(None, kv_cache_dtype="int4")
