"""A shape is ready once it is compiled and all its runs have a time."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.compilation import compile_ahead
from jaxspec.step.batch import BatchShape
from jaxspec.step.profiles import ProfileStore
from jaxspec.step.programs import Programs
from jaxspec.step.warmup import WarmUp

SHAPES = [BatchShape(tokens, 1, 1, 1) for tokens in (1, 8, 64)]


class Set:
    """Programs that are only names, with two runs each."""

    def __init__(self, store: ProfileStore, guessed: int | None = None) -> None:
        self.ran: list[str] = []
        self.told: list[int] = []
        runs = {s: {name: lambda name=name: self.ran.append(name) for name in names(s)} for s in SHAPES}
        self.programs = Programs(
            "test", "key", runs, lambda s: f"program {s.tokens}", store,
            guess=lambda s: 1.0 if s.tokens == guessed else None,
        )  # fmt: skip
        self.programs.on_ready = lambda shape: self.told.append(shape.tokens)

    def adopt(self, *tokens: int) -> None:
        jobs = [self.programs.job(str(s.tokens), s) for s in SHAPES if s.tokens in tokens]
        WarmUp().compile_now("", jobs)

    @property
    def ready(self) -> list[int]:
        return [shape.tokens for shape in self.programs.ready]


def names(shape: BatchShape) -> list[str]:
    return [f"{shape.tokens} short", f"{shape.tokens} long"]


def test_compiled_and_timed() -> None:
    made = Set(ProfileStore(), guessed=8)
    made.adopt(64)
    assert made.ready == []
    made.programs.profile.sample()
    assert made.ready == [] and len(made.ran) == 1, "one of its two runs has no time yet"
    made.programs.profile.sample()
    assert made.ready == made.told == [64] and made.programs[SHAPES[2]] == "program 64"
    made.adopt(8)
    assert made.ready == [8, 64] and made.told == [64, 8] and len(made.ran) == 2, "its times were guessed"
    made.adopt(1)
    made.programs.profile.measure()
    assert made.ready == [1, 8, 64] and sorted(made.told) == [1, 8, 64]


def test_stored_times_make_a_compiled_shape_ready(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    first = Set(store)
    first.adopt(1, 8, 64)
    first.programs.profile.measure()
    later = Set(store)
    assert later.ready == []
    later.adopt(8)
    assert later.ready == later.told == [8] and not later.ran


def test_programs_are_compiled_from_arrays_that_were_donated() -> None:
    """As when a step runs while the background thread compiles."""
    x = jax.device_put(jnp.zeros(4), jax.devices()[0])
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert x.is_deleted()
    program = compile_ahead(lambda x: x * 2, x)
    np.testing.assert_array_equal(program(jnp.ones(4)), 2)
