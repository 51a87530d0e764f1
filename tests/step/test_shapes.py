"""The shapes in the signatures of the step's functions hold at run time, checked by jaxtyping and beartype."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args, get_type_hints

import jax.numpy as jnp
import pytest
from jaxtyping import jaxtyped

from jaxspec.step.batch import Batch, BatchBuffers, BatchShape

#: jaxtyping checks modules that are imported under its hook, so each check runs in a process of its own.
_HOOK = """
from jaxtyping import install_import_hook
modules = ("batch", "tree", "step", "sampler", "rejection", "penalties", "attention")
install_import_hook([f"jaxspec.step.{name}" for name in modules], "beartype.beartype").__enter__()

import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.step.layers import Layers
typing.runtime_checkable(Layers)  # beartype checks arguments that are declared as this protocol

from helpers import tiny
from jaxspec.step.attention import Earlier, over_earlier
from jaxspec.step.batch import Batch, BatchBuffers, BatchShape
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.kv_int8 import Int8KVCache
from jaxspec.step.penalties import PenaltyTable, UPDATE, add_tokens, reset
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.step import make_step, split
from jaxspec.step.tree import accept, ancestors
from jaxspec.step.xla import XlaLayers

T, C, R = 8, 6, 2
loaded, layers = tiny.model(None), XlaLayers()
config = loaded.config
table = PenaltyTable.empty(1, config.vocab_size)
none = DraftDistributions.empty()
"""

#: Traces the whole step: sampling, penalties, acceptance and attention over both kinds of KV cache. Shapes are static,
#: so tracing checks all of them.
_STEP = """
graph, treedef, leaves = split(layers.decoder(config, loaded.weights, "float32"))
drawn = DraftDistributions.zeros(R, 3, 2, jnp.arange(20, dtype=jnp.int32))
exact = KVCache.zeros(config, 8, 16, "float32")
int8 = Int8KVCache.zeros(config, 8, 16, "float32", False, R)
for shape, kv_cache, drafts in (
    (BatchShape(T, C, R, 5), exact, none),
    (BatchShape(T, C, R, 5, children=2), exact, drawn),
    (BatchShape(T, C, R, 5, written=3), int8, none),
):
    buffer, _ = BatchBuffers([shape]).take(shape)
    step = jax.jit(make_step(graph, treedef, shape, layers))
    _, result = jax.eval_shape(step, leaves, kv_cache, table, drafts, jnp.asarray(buffer))
    assert result.decision.shape == (C + T,), result
zeros, zero = np.zeros(UPDATE, np.int32), np.int32(0)
jax.eval_shape(add_tokens, table, zero, zeros, zeros.astype(np.float32), zero, np.bool_(False))
jax.eval_shape(reset, table, jnp.int32(0))
slots = jnp.zeros((1, R, 5, 2, 4))
part = jax.eval_shape(
    over_earlier, jnp.zeros((2, R * 3, 2, 4)), Earlier(slots, slots, jnp.zeros((R, 3, 5), bool)), jnp.int32(0)
)
assert part.out.shape == (2, R * 3, 2, 4)
print("ok")
"""

#: `known` has a node more than the other arguments.
_WRONG = """
ones = jnp.ones(T, jnp.int32)
accept(ones, ones, ones, jnp.zeros(C, jnp.int32), ancestors(ones))
print("ok so far")
accept(ones, jnp.ones(T + 1, jnp.int32), ones, jnp.zeros(C, jnp.int32), ancestors(ones))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    # The tests' folder is on this process's path by pytest's setting.
    prelude = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
    return subprocess.run([sys.executable, "-c", prelude + _HOOK + code], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_whole_step_is_traced_with_its_shapes_checked() -> None:
    done = run(_STEP)
    assert done.stdout == "ok\n", done.stderr[-4000:]


def test_a_wrong_shape_is_refused() -> None:
    done = run(_WRONG)
    assert done.returncode and done.stdout == "ok so far\n", done.stderr[-4000:]
    assert "TypeCheckError" in done.stderr and "known" in done.stderr


def fits(value: Any, hint: Any) -> bool:
    """`isinstance` of one of the types in a union: Python's own for unions asks for the value's class only."""
    return any(isinstance(value, kind) for kind in get_args(hint))


@pytest.mark.parametrize(("children", "written"), [(0, 0), (3, 0), (0, 5)])
def test_every_field_of_a_batch_has_the_shape_it_states(children: int, written: int) -> None:
    """Each letter stands for one size in all fields, on the host and on the device."""
    shape = BatchShape(11, 7, 3, 13, children, written)
    buffer, views = BatchBuffers([shape]).take(shape)
    hints = get_type_hints(Batch)
    for batch in (views, Batch.unpack(jnp.asarray(buffer), shape)):
        with jaxtyped("context"):
            wrong = [name for name, hint in hints.items() if not fits(getattr(batch, name), hint)]
            assert wrong == []
    with jaxtyped("context"):
        assert fits(views.token, hints["token"])
        assert not fits(views.token[:-1], hints["position"])
