"""The bounds of temporaries, against what XLA reports for programs compiled for GPUs.

The tables hold `memory_analysis().temp_size_in_bytes` in MB of steps that JAX 0.10.2 compiled for a card that was not
there, so without autotuning. Pages have 32 positions; Llama has the given number of layers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers import tiny
from helpers.cards import LLAMA_8B, SMOLLM2
from jaxspec.step.batch import BatchShape
from jaxspec.step.kv_int8 import most_written
from jaxspec.step.temporaries import Program

MODELS = {"llama8b": LLAMA_8B, "smollm2": SMOLLM2, "tiny": tiny.config()}
PAGE = 32

#: Steps with XLA's attention, for H200: model, layers, dtype, tokens, max_num_seqs, INT8 -> MB.
XLA_STEPS = [
    ("llama8b", 2, "bfloat16", 256, 64, False, 113.4),
    ("llama8b", 2, "bfloat16", 2048, 64, False, 726.8),
    ("llama8b", 2, "float32", 2048, 64, False, 802.3),
    ("llama8b", 2, "bfloat16", 256, 64, True, 144.8),
]
#: Steps of Llama with the kernel, for H200 in bfloat16: layers, tokens, pages per request -> MB. `make
#: test-gpu-compile` checks others as it compiles them.
STEPS = [
    (2, 16, 64, 27.1),
    (32, 64, 64, 132.2),
    (8, 512, 64, 906.9),
    (2, 64, 4096, 108.6),
]


def step(tokens: int, seqs: int, children: int = 0, int8: bool = False) -> BatchShape:
    trees = min(tokens, seqs)
    written = most_written(tokens, trees, PAGE) if int8 else 0
    return BatchShape(tokens, min(tokens, max(seqs, 64)), trees, 8192 // PAGE, children, written)


@pytest.mark.parametrize(("model", "layers", "dtype", "tokens", "seqs", "int8", "megabytes"), XLA_STEPS)
def test_a_step_with_the_attention_of_xla(
    model: str, layers: int, dtype: str, tokens: int, seqs: int, int8: bool, megabytes: float
) -> None:
    program = Program(replace(MODELS[model], num_layers=layers), dtype, PAGE, kernel=False)
    assert 1 <= program.step_bytes(step(tokens, seqs, int8=int8)) / (megabytes * 1e6) <= 2


@pytest.mark.parametrize(("layers", "tokens", "pages", "megabytes"), STEPS)
def test_a_step_with_the_kernel(layers: int, tokens: int, pages: int, megabytes: float) -> None:
    program = Program(replace(LLAMA_8B, num_layers=layers), "bfloat16", PAGE, kernel=True)
    shape = BatchShape(tokens, min(tokens, 512), min(tokens, 64), pages)
    assert 1 <= program.step_bytes(shape) / (megabytes * 1e6) <= 2


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_options_need_more(model: str, kernel: bool) -> None:
    program = Program(MODELS[model], "bfloat16", PAGE, kernel)
    plain = program.step_bytes(step(256, 64))
    assert program.step_bytes(step(256, 64, int8=True)) >= plain
    assert program.step_bytes(step(256, 64, children=2)) >= plain
    assert program.step_bytes(step(256, 128)) >= plain
