"""What XLA makes of the engine's programs on NVIDIA cards, compiled without one: `make test-gpu-compile`.

Files here do not match pytest's `test_*.py`: they need JAX's CUDA plugin, which `make test` does not install.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import jax
import pytest

from helpers.cards import LLAMA_8B, SMOLLM2
from helpers.families import recorded
from helpers.gpu_compiler import CARDS, Compiled, optimised
from helpers.gpu_programs import compile_round, compile_step
from jaxspec.models.config import Experts
from jaxspec.models.load.hf_config import decoder_config
from jaxspec.step.kv_int8 import AnyKVCache
from jaxspec.step.quantization import quantize

#: Most kernels of a layer, and of all that surrounds the layers: input, head, argmax, acceptance, commit.
LAYER, REST = 13, 75
#: Most operations that a launch rewrites: one reads what was sent, and each array of the results is written by one.
REWRITTEN = 8
#: A Mistral-like model of four layers: groups of four, and a sliding window in every layer.
WINDOWED = replace(LLAMA_8B, num_layers=4, sliding_window=4096)

#: Tiny models of every family.
RECORDED = recorded()

#: (name, card, program, its batch shape) -> None: adds a row to the table at the end.
Report = Callable[..., None]


def pool_bytes(cache: AnyKVCache) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def check_launch(program: Compiled) -> None:
    """One CUDA graph, of which a launch rewrites a few operations, and no branches or loops."""
    assert program.outside == ["kCommandBuffer"] and program.in_place
    assert len(program.rewritten) <= REWRITTEN
    assert not {"conditional", "while", "call"} & set(program.rewritten)


def check(program: Compiled, layers: int, cache: AnyKVCache, bound: int) -> None:
    """One CUDA graph without loops around layers, few kernels, no copied weights, and the pool updated in place.

    `bound`: bytes of temporaries that the engine leaves free for the program.
    """
    check_launch(program)
    # On a card it would be CUB's, which no graph can hold; without one, XLA's own stands in for it.
    assert not program.sorts
    assert "kWhile" not in {thunk.kind for thunk in program.always}
    assert "kDynamicSliceFusion" not in {thunk.kind for thunk in program.thunks}
    assert program.named("tree_attention") == program.named("merge_attention") == layers
    assert len(program.kernels) <= LAYER * layers + REST
    assert program.aliased_bytes >= pool_bytes(cache)
    assert program.temporary_bytes <= bound <= 2 * program.temporary_bytes


def count(program: Compiled, kind: str) -> int:
    return sum(thunk.kind == kind for thunk in program.thunks)


@pytest.mark.parametrize("card", CARDS)
def test_a_decoding_step_of_an_8b_model(card: str, report: Report) -> None:
    layers = 32 if card == "h200" else 4
    program, shape, cache, bound = compile_step(card, replace(LLAMA_8B, num_layers=layers), 64)
    report(f"Llama-3.1-8B, {layers} layers, 64 tokens", card, program, shape)
    check(program, layers, cache, bound)
    assert 4 * shape.size <= 64 * 1024
    assert program.temporary_bytes < 150e6  # less than a layer's weights: none is copied
    assert program.ptx.count("mma.") > 0


def test_a_step_of_prompts(report: Report) -> None:
    program, shape, cache, bound = compile_step("h200", replace(LLAMA_8B, num_layers=4), 2048, pages=4096)
    report("Llama-3.1-8B, 4 layers, 2,048 tokens", "h200", program, shape)
    check(program, 4, cache, bound)
    assert "wgmma.mma_async" in program.ptx


def test_an_int8_pool_and_a_sliding_window(report: Report) -> None:
    program, shape, cache, bound = compile_step("h200", WINDOWED, 64, int8=True)
    report("the same with INT8 KV and a sliding window, 64 tokens", "h200", program, shape)
    check(program, 4, cache, bound)


def test_values_are_divided_by_the_scale_that_is_stored() -> None:
    """XLA leaves out a conversion to bfloat16 and back, unless the values are rounded by an operation of their own."""
    x = jax.ShapeDtypeStruct((64, 32), "float32")
    assert "reduce-precision" in optimised("h200", lambda x: quantize(x, -1), x)


def test_small_heads_and_a_feature_pool(report: Report) -> None:
    program, shape, cache, bound = compile_step("h200", SMOLLM2, 64, features=True)
    report("SmolLM2-135M, 64 tokens, with features", "h200", program, shape)
    check(program, 30, cache, bound)


def test_float32_uses_no_lower_precision(report: Report) -> None:
    program, shape, cache, bound = compile_step("h200", replace(SMOLLM2, num_layers=2), 16, dtype="float32")
    report("SmolLM2-135M, 2 layers, float32, 16 tokens", "h200", program, shape)
    check(program, 2, cache, bound)
    assert not re.search(r"mma\S*\.(tf32|bf16|f16)", program.ptx)


@pytest.mark.parametrize("name", RECORDED)
def test_every_family(name: str, report: Report) -> None:
    """Softcaps, windows, learned positions and experts do not break the graph into pieces."""
    c = decoder_config(RECORDED[name]["config"], name)
    program, shape, _, _ = compile_step("h200", c, 16)
    report(f"tiny {name}, 16 tokens", "h200", program, shape)
    check_launch(program)
    assert not program.sorts
    assert program.named("tree_attention") == program.named("merge_attention") == c.num_layers


@pytest.mark.parametrize("tokens", [16, 256])
def test_experts_are_in_the_graph_and_take_no_more_memory_than_is_left_free(tokens: int, report: Report) -> None:
    c = replace(LLAMA_8B, num_layers=2, hidden_size=2048, num_heads=16, experts=Experts(16, 4, 1024))
    program, shape, _, bound = compile_step("h200", c, tokens)
    report(f"16 experts, 2 layers, {tokens} tokens", "h200", program, shape)
    check_launch(program)
    assert not program.sorts
    assert program.named("expert_products") == 2 * c.num_layers
    assert program.temporary_bytes <= bound


def test_a_draft_round(report: Report) -> None:
    """Levels are a loop inside the graph, whose number of turns is an argument."""
    program, shape, bound = compile_round("h200", SMOLLM2, requests=16)
    report("draft round of an EAGLE drafter, 16 requests", "h200", program, shape)
    check_launch(program)
    assert not program.sorts
    assert sum(thunk.kind == "kWhile" for thunk in program.thunks) == 1
    assert program.named("tree_attention") == 2  # catching up, and a level
    assert program.temporary_bytes <= bound <= 2 * program.temporary_bytes


@pytest.mark.parametrize("int8", [False, True])
def test_a_step_over_two_cards(int8: bool, report: Report) -> None:
    """Its exchanges are part of the one graph: two sums per layer, and the columns of embedding and logits."""
    model = replace(LLAMA_8B, num_layers=4)
    program, shape, cache, bound = compile_step("h200", model, 64, int8=int8, cards=2)
    report(f"Llama-3.1-8B, 4 layers{', INT8 KV' * int8}, one of two cards, 64 tokens", "h200", program, shape)
    check_launch(program)
    assert not program.sorts
    assert program.named("tree_attention") == program.named("merge_attention") == 4
    assert count(program, "kAllReduce") == 8 and count(program, "kAllGather") == 2
    assert program.aliased_bytes >= pool_bytes(cache) // 2
    assert program.temporary_bytes <= bound <= 2 * program.temporary_bytes


def test_a_draft_round_over_two_cards(report: Report) -> None:
    program, shape, bound = compile_round("h200", LLAMA_8B, requests=16, cards=2)
    report("draft round of an EAGLE drafter, one of two cards, 16 requests", "h200", program, shape)
    check_launch(program)
    assert not program.sorts
    assert count(program, "kAllReduce") == count(program, "kAllGather") == 4
    assert program.temporary_bytes <= bound <= 2 * program.temporary_bytes
