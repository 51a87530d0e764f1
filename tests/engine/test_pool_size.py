"""The KV pool of real models on cards that are not here."""

from __future__ import annotations

import gc
from typing import Any

import jax
import pytest

from helpers import cards
from helpers.cards import CARDS, LLAMA_8B, SMOLLM2, Card
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.engine.pool_size import kv_pool_pages, memory_uses
from jaxspec.models.config import DecoderConfig
from jaxspec.step.device_memory import RESERVE
from jaxspec.step.kv_cache import KVCache, pages_for
from jaxspec.step.kv_int8 import Int8KVCache

#: Bytes per token of KV: keys and values of 32 layers with 8 heads of 128.
LLAMA_KV = 2 * 32 * 8 * 128
LLAMA_WEIGHTS = 8_030_261_248
ITEM = {"bfloat16": 2, "float32": 4}


def size(model: DecoderConfig, dtype: str, drafters: Any = None, features: bool = False, **settings: Any) -> int:
    config = EngineConfig.load(None, dtype=dtype, **settings)
    return kv_pool_pages(config, model, dtype, drafters or {}, features)


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    cards.install(monkeypatch, Card(request.param, 0.9))
    return request.param


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("card", CARDS, indirect=True)
def test_llama_8b(card: str, dtype: str) -> None:
    """The pool takes what weights leave of 90 % of the card, except for less than two gigabytes."""
    left = 0.9 * CARDS[card] - LLAMA_WEIGHTS * ITEM[dtype]
    if left < 0:
        with pytest.raises(ConfigError, match=rf"the weights do not fit: they take \d+\.\d+ GiB in {dtype}"):
            size(LLAMA_8B, dtype)
        return
    pool = size(LLAMA_8B, dtype) * 32 * LLAMA_KV * ITEM[dtype]
    assert RESERVE < left - pool < 2e9


def test_which_cards_hold_llama_8b_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, message = {}, ""
    for name in CARDS:
        cards.install(monkeypatch, Card(name, 0.9))
        try:
            fits[name] = size(LLAMA_8B, "float32") > 0
        except ConfigError as error:
            message, fits[name] = str(error), False
    assert fits == {"h200": True, "h100": True, "a100": True, "a100-40": True, "l4": False}
    assert "29.92 GiB" in message and "dtype: bfloat16" in message


@pytest.mark.parametrize("card", CARDS, indirect=True)
def test_smollm2(card: str) -> None:
    left = 0.9 * CARDS[card] - 163_000_000 * 4  # the tied embedding is there twice
    assert RESERVE < left - size(SMOLLM2, "float32") * 32 * 2 * 30 * 3 * 64 * 4 < 1e9


@pytest.mark.parametrize("card", ["l4"], indirect=True)
def test_a_step_that_leaves_no_room(card: str) -> None:
    with pytest.raises(ConfigError, match=r"would hold 0 tokens, fewer than one request of 1024.*max_num_seqs"):
        size(LLAMA_8B, "bfloat16", max_num_seqs=1024, max_num_batched_tokens=8192)


@pytest.mark.parametrize("card", ["h200"], indirect=True)
def test_every_step_size_counts(card: str) -> None:
    """The step that needs most decides."""
    arguments = LLAMA_8B, "bfloat16", {}, False, jax.devices()
    uses = [memory_uses(EngineConfig(max_num_batched_tokens=256, token_buckets=b), *arguments) for b in ([256], [64])]
    (both,) = memory_uses(EngineConfig(max_num_batched_tokens=512, token_buckets=[64, 256]), *arguments)
    assert uses[0] == uses[1]  # the token budget is always one of the sizes
    assert uses[0][0].temporaries < both.temporaries


@pytest.mark.parametrize("card", ["h100"], indirect=True)
def test_int8_holds_nearly_twice_as_much(card: str) -> None:
    exact, int8 = size(LLAMA_8B, "bfloat16"), size(LLAMA_8B, "bfloat16", kv_cache_dtype="int8")
    assert 1.7 < int8 / exact < 64 / 36


@pytest.mark.parametrize("card", ["h100"], indirect=True)
def test_a_page_is_what_the_arrays_take(card: str) -> None:
    """Of the target with and without INT8 and features, and of a drafter; open pages are counted once."""
    drafters = {"eagle": cards.drafter(LLAMA_8B), "ngram": None}
    for int8 in (False, True):
        config = EngineConfig(kv_cache_dtype="int8" if int8 else "auto")
        arguments = config, LLAMA_8B, "bfloat16", drafters, True, jax.devices()
        target, drafter = memory_uses(*arguments)

        def pool(pages: int, c: DecoderConfig, int8: bool, features: bool) -> int:
            if int8:
                made = jax.eval_shape(lambda: Int8KVCache.zeros(c, pages, 32, "bfloat16", features, 64))
            else:
                made = jax.eval_shape(lambda: KVCache.zeros(c, pages, 32, "bfloat16", features))
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made))

        assert 10 * target.page == pool(10, LLAMA_8B, int8, True) - pool(0, LLAMA_8B, int8, True)
        assert 10 * drafter.page == pool(10, drafters["eagle"][0], False, False)
        penalties = 65 * 128256 * 9
        assert target.tables == penalties + (pool(0, LLAMA_8B, int8, True) if int8 else 0)


@pytest.mark.parametrize("card", ["h100"], indirect=True)
def test_rejection_sampling_keeps_distributions(card: str) -> None:
    drafters = {"eagle": cards.drafter(LLAMA_8B)}
    arguments = LLAMA_8B, "bfloat16", drafters, True, jax.devices()
    match, rejection = (memory_uses(EngineConfig(acceptance=a), *arguments)[0] for a in ("match", "rejection"))
    assert rejection.tables - match.tables == (64 * 8 * 32000 + 32000) * 4
    assert rejection.temporaries > match.temporaries


def test_a_drafter_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes nothing of the target's device, but the pool has no more pages than its own device holds."""
    drafters = {"eagle": cards.drafter(LLAMA_8B)}
    own = {"draft_devices": {"eagle": 1}}
    cards.install(monkeypatch, Card("h100", 0.9), Card("h100", 0.9, id=1))
    alone = size(LLAMA_8B, "bfloat16", features=True)
    assert size(LLAMA_8B, "bfloat16", drafters, True, **own) == alone > size(LLAMA_8B, "bfloat16", drafters, True)
    cards.install(monkeypatch, Card("h100", 0.9), Card("l4", 0.9, in_use=int(17.5e9), id=1))
    assert size(LLAMA_8B, "bfloat16", drafters, True, **own) < alone
    with pytest.raises(ConfigError, match="no device 2, there are 2"):
        size(LLAMA_8B, "bfloat16", drafters, True, draft_devices={"eagle": 2})


def test_an_engine_that_was_dropped_frees_its_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropped:
        """Holds nearly all of the card, and itself in a reference cycle."""

        def __init__(self, card: Card) -> None:
            self.card, self.itself, card.in_use = card, self, int(75e9)

        def __del__(self) -> None:
            self.card.in_use = 0

    cards.install(monkeypatch, Card("h100", 0.9))
    expected = size(LLAMA_8B, "bfloat16")
    cards.install(monkeypatch, card := Card("h100", 0.9))
    gc.disable()
    try:
        Dropped(card)
        assert card.in_use and size(LLAMA_8B, "bfloat16") == expected
    finally:
        gc.enable()


def test_a_card_that_does_not_say(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cards.install(monkeypatch, Card("l4", None))
    assert size(SMOLLM2, "float32", max_model_len=512) == 64 * 512 // 32
    assert "sized by the host's memory" in caplog.text


def test_cpus_are_sized_by_the_hosts_memory() -> None:
    config = EngineConfig(max_model_len=512)
    assert jax.devices()[0].platform == "cpu"
    pages = kv_pool_pages(config, SMOLLM2, "float32", {}, False)
    assert pages == pages_for(config, SMOLLM2, "float32") == 64 * 512 // 32
