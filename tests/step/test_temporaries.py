"""The bounds of temporaries, against what XLA reports for programs compiled for GPUs.

The tables hold `memory_analysis().temp_size_in_bytes` in MB of steps and draft rounds that JAX 0.10.2 compiled for
cards which were not there, so without autotuning. Pages have 32 positions; Llama has the given number of layers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers import tiny
from helpers.cards import CORES, LLAMA_8B, SMOLLM2
from jaxspec.sched.spec.trees.policy import DEPTH
from jaxspec.step.batch import BatchShape
from jaxspec.step.kv_int8 import most_written
from jaxspec.step.temporaries import Program

MODELS = {"llama8b": LLAMA_8B, "smollm2": SMOLLM2, "tiny": tiny.config()}
PAGE = 32

#: Card, kernel, model, layers, dtype, tokens, max_num_seqs, children of rejection sampling, INT8 -> MB.
STEPS = [
    ("h200", True, "llama8b", 2, "bfloat16", 1, 1, 0, False, 2.2),
    ("h200", True, "llama8b", 2, "bfloat16", 64, 64, 0, False, 119.6),
    ("h200", True, "llama8b", 2, "bfloat16", 256, 16, 0, False, 113.4),
    ("h200", True, "llama8b", 2, "bfloat16", 2048, 64, 0, False, 397.3),
    ("h200", True, "llama8b", 2, "bfloat16", 2048, 256, 0, False, 1209.1),
    ("h200", True, "llama8b", 2, "bfloat16", 2048, 1024, 0, False, 4456.5),
    ("h200", True, "llama8b", 2, "float32", 2048, 64, 0, False, 542.2),
    ("h200", True, "llama8b", 8, "bfloat16", 2048, 64, 0, False, 552.5),
    ("h200", True, "llama8b", 16, "bfloat16", 2048, 64, 0, False, 753.8),
    ("h200", True, "llama8b", 8, "float32", 2048, 64, 0, False, 895.1),
    ("h200", True, "llama8b", 2, "bfloat16", 256, 64, 0, True, 151.2),
    ("h200", True, "llama8b", 8, "bfloat16", 256, 64, 0, True, 302.5),
    ("h200", True, "llama8b", 8, "float32", 256, 64, 0, True, 596.1),
    ("h200", True, "llama8b", 8, "bfloat16", 2048, 64, 0, True, 793.4),
    ("h200", True, "llama8b", 2, "bfloat16", 256, 64, 4, False, 310.5),
    ("h200", True, "llama8b", 2, "bfloat16", 2048, 1024, 4, False, 4920.7),
    ("h200", True, "smollm2", 30, "float32", 256, 64, 0, False, 159.1),
    ("h200", True, "smollm2", 30, "bfloat16", 2048, 64, 0, False, 187.1),
    ("h200", False, "llama8b", 2, "bfloat16", 256, 64, 0, False, 113.4),
    ("h200", False, "llama8b", 2, "bfloat16", 2048, 64, 0, False, 726.8),
    ("h200", False, "llama8b", 2, "float32", 2048, 64, 0, False, 802.3),
    ("h200", False, "llama8b", 2, "bfloat16", 256, 64, 0, True, 144.8),
    ("h200", True, "tiny", 2, "float32", 256, 64, 0, False, 5.1),
    ("h200", True, "llama8b", 8, "bfloat16", 64, 64, 0, False, 157.3),
    ("l4", True, "llama8b", 8, "bfloat16", 64, 64, 0, False, 132.2),
    ("a100", True, "llama8b", 8, "bfloat16", 16, 16, 0, False, 39.3),
    ("h200", True, "smollm2", 30, "bfloat16", 256, 64, 0, False, 159.1),
    ("l4", True, "smollm2", 30, "float32", 256, 64, 0, False, 70.6),
    ("l4", True, "smollm2", 30, "bfloat16", 256, 64, 0, False, 55.9),
    ("h200", True, "smollm2", 30, "float32", 16, 16, 0, False, 17.6),
    ("h200", True, "smollm2", 30, "float32", 64, 64, 0, False, 70.5),
    ("h200", True, "smollm2", 30, "float32", 256, 64, 0, True, 407.4),
    ("h200", True, "smollm2", 30, "bfloat16", 1024, 64, 0, False, 116.9),
    ("h200", True, "smollm2", 30, "float32", 2048, 256, 0, False, 467.6),
    ("h200", True, "llama8b", 32, "bfloat16", 256, 64, 0, False, 246.7),
    ("l4", True, "llama8b", 32, "bfloat16", 256, 64, 0, True, 1210.1),
    ("a100", True, "llama8b", 32, "float32", 256, 64, 0, False, 351.7),
    ("h100", True, "llama8b", 32, "bfloat16", 2048, 256, 0, False, 1985.1),
    ("h200", True, "llama8b", 1, "bfloat16", 64, 64, 1, False, 211.5),
    ("h200", True, "llama8b", 1, "bfloat16", 64, 64, 3, False, 253.0),
    ("h200", True, "smollm2", 30, "bfloat16", 512, 64, 0, False, 70.9),
    ("l4", True, "smollm2", 30, "bfloat16", 128, 64, 0, False, 101.5),
    ("h200", True, "smollm2", 30, "float32", 1024, 64, 0, False, 179.2),
    ("h200", True, "smollm2", 30, "bfloat16", 384, 64, 0, False, 129.7),
    ("h200", True, "llama8b", 8, "bfloat16", 128, 64, 0, False, 240.8),
    ("l4", True, "llama8b", 8, "bfloat16", 128, 64, 0, False, 153.8),
    ("a100", True, "llama8b", 8, "float32", 32, 32, 0, False, 78.7),
    ("h200", True, "smollm2", 30, "float32", 512, 64, 0, False, 100.5),
    ("h200", True, "llama8b", 8, "bfloat16", 192, 64, 0, False, 218.1),
    ("a100", True, "llama8b", 8, "bfloat16", 128, 64, 0, False, 191.5),
    ("h200", True, "llama8b", 8, "float32", 96, 64, 0, False, 216.5),
]
#: Kernel, model, layers, dtype, tokens, requests, draft vocabulary, width -> MB, all for H200.
ROUNDS = [
    (True, "llama8b", 1, "bfloat16", 256, 64, 32000, 4, 568.8),
    (True, "llama8b", 4, "bfloat16", 256, 64, 128256, 4, 597.1),
    (True, "llama8b", 4, "float32", 256, 64, 128256, 4, 650.7),
    (True, "llama8b", 1, "bfloat16", 256, 1, 128256, 4, 35.7),
    (True, "llama8b", 4, "bfloat16", 2048, 256, 128256, 4, 4569.7),
    (True, "llama8b", 2, "bfloat16", 256, 64, 128256, 3, 478.6),
    (True, "smollm2", 4, "float32", 256, 64, 8192, 4, 133.2),
    (True, "smollm2", 15, "float32", 2048, 64, 49152, 4, 317.5),
    (False, "llama8b", 2, "bfloat16", 256, 64, 128256, 4, 157.9),
]


def step(tokens: int, seqs: int, children: int = 0, int8: bool = False) -> BatchShape:
    trees = min(tokens, seqs)
    written = most_written(tokens, trees, PAGE) if int8 else 0
    return BatchShape(tokens, min(tokens, max(seqs, 64)), trees, 8192 // PAGE, children, written)


@pytest.mark.parametrize(
    ("card", "kernel", "model", "layers", "dtype", "tokens", "seqs", "children", "int8", "megabytes"), STEPS
)
def test_a_step(
    card: str, kernel: bool, model: str, layers: int, dtype: str, tokens: int, seqs: int, children: int, int8: bool,
    megabytes: float,
) -> None:  # fmt: skip
    program = Program(replace(MODELS[model], num_layers=layers), dtype, PAGE, kernel, CORES[card])
    assert 1 <= program.step_bytes(step(tokens, seqs, children, int8)) / (megabytes * 1e6) <= 2


@pytest.mark.parametrize(
    ("kernel", "model", "layers", "dtype", "tokens", "requests", "vocab", "width", "megabytes"), ROUNDS
)
def test_a_draft_round(
    kernel: bool, model: str, layers: int, dtype: str, tokens: int, requests: int, vocab: int, width: int,
    megabytes: float,
) -> None:  # fmt: skip
    program = Program(replace(MODELS[model], num_layers=layers), dtype, PAGE, kernel)
    shape = BatchShape(tokens, requests, requests, 8192 // PAGE)
    assert 1 <= program.round_bytes(shape, vocab, width, DEPTH) / (megabytes * 1e6) <= 2


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_options_need_more(model: str, kernel: bool) -> None:
    program = Program(MODELS[model], "bfloat16", PAGE, kernel)
    plain = program.step_bytes(step(256, 64))
    assert program.step_bytes(step(256, 64, int8=True)) >= plain
    assert program.step_bytes(step(256, 64, children=2)) >= plain
    assert program.step_bytes(step(256, 128)) >= plain
