"""Programs with outboxes give the results of programs without, which stay readable for as long as they say."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.step.addresses import Executable, ProgramSpec
from jaxspec.step.xla import XlaLayers

#: Results that may be unread when the next run starts.
UNREAD = 2


class Steady(XlaLayers):
    steady = True


class Result(NamedTuple):
    total: jax.Array
    parts: tuple[jax.Array, jax.Array]


def add(pool: jax.Array, sent: jax.Array, before: jax.Array) -> tuple[jax.Array, Result]:
    """The pool grows by what is sent, and the result by that of the run before."""
    pool = pool + sent
    total = pool * 2 + before
    return pool, Result(total, (total[:2], total[2:].astype(jnp.float32) / 2))


NOTHING = jnp.zeros(5, jnp.int32)


def spec_of(layers: XlaLayers) -> ProgramSpec:
    return ProgramSpec.of(layers, add, (NOTHING, NOTHING, NOTHING), 2, donate=[0], moving=[1, 2, 9])


@cache
def executable(layers: type[XlaLayers]) -> Executable:
    return Executable(layers(), spec_of(layers()), UNREAD)


@settings(deadline=None, max_examples=30)
@given(runs=st.integers(1, 9), seed=st.integers(0, 2**32 - 1), reset=st.booleans())
def test_results_are_those_of_a_program_without_outboxes(runs: int, seed: int, reset: bool) -> None:
    sent = list(np.random.default_rng(seed).integers(-(2**20), 2**20, (runs, 5)).astype(np.int32))
    expected = read(executable(XlaLayers), sent, 0)
    assert read(executable(Steady), sent, UNREAD, reset) == expected


def read(program: Executable, sent: list[np.ndarray], unread: int, reset: bool = False) -> list[Any]:
    """The results of runs, each read after `unread` more runs have started."""
    pool, before = jnp.zeros(5, jnp.int32), NOTHING
    pending, found = list[Result](), []
    for i, array in enumerate(sent):
        if reset and i == len(sent) // 2:
            program.reset()
        pool, result = program(pool, array, before)
        before = result.total
        pending.append(result)
        if len(pending) > unread:
            found.append(plain(pending.pop(0)))
    return found + [plain(result) for result in pending]


def plain(result: Result) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).tolist(), result)


def test_an_outbox_is_used_again_when_it_may_have_been_read() -> None:
    program = executable(Steady)
    program.reset()
    pool, results = jnp.zeros(5, jnp.int32), []
    for _ in range(UNREAD + 2):
        pool, result = program(pool, np.ones(5, np.int32), NOTHING)
        results.append(result)
    assert results[0].total.is_deleted()
    assert not any(result.total.is_deleted() for result in results[1:])
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(results[0].total)


def test_without_steady_layers_nothing_changes() -> None:
    made = spec_of(XlaLayers())
    assert made.outbox is None and made.donate == (0,) and len(made.arguments) == 3


def test_after_a_reset_lost_outboxes_are_not_used() -> None:
    program, sent = executable(Steady), [np.full(5, i, np.int32) for i in range(UNREAD + 1)]
    program.reset()
    read(program, sent, 0)
    for array in jax.tree.leaves(list(program._used)):
        array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        read(program, sent, 0)
    program.reset()
    assert read(program, sent, 0) == read(executable(XlaLayers), sent, 0)


def test_a_program_is_traced_once() -> None:
    """The shapes of its result are those of the trace that is compiled."""
    traced = 0

    def counted(pool: jax.Array, sent: jax.Array, before: jax.Array) -> tuple[jax.Array, Result]:
        nonlocal traced
        traced += 1
        return add(pool, sent, before)

    arguments = NOTHING, NOTHING, NOTHING
    Executable(Steady(), ProgramSpec.of(Steady(), counted, arguments, 2, donate=[0], moving=[1, 2]), UNREAD)
    assert traced == 1
