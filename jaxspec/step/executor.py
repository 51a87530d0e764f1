"""What lives on the device: weights, KV pool, penalty table and the compiled steps that run on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.models.config import DecoderConfig
from jaxspec.models.llama import Decoder, device_weights, transpose_weights
from jaxspec.step import penalties, pool
from jaxspec.step.batch import BatchShape
from jaxspec.step.choose import Logprobs
from jaxspec.step.compiles import compile_counter
from jaxspec.step.lattice import compile_all, lattice
from jaxspec.step.packing import Packed, Tree, pack
from jaxspec.step.target import StepResult, make_step, split

#: (stage, done, total)
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """No progress report."""


class Flight:
    """A step under way on the device. `read` waits for it."""

    def __init__(self, packed: Packed, result: StepResult):
        self.packed, self._result = packed, result

    def read(self) -> np.ndarray:
        """The decision vector `[C + T]` int32: choices, then accepted flags."""
        return np.asarray(self._result.decision)

    @cached_property
    def logprobs(self) -> Logprobs | None:
        """Log-probabilities of all choices, as numpy, transferred once; None if no tree asked for them."""
        return jax.device_get(self._result.logprobs) if self.packed.logprobs else None


class Executor:
    """Runs packed steps of one model. All programs are compiled in `__init__`; afterwards nothing compiles.

    Not thread-safe: one thread, the engine's loop, calls it.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderConfig,
        weights: dict[str, np.ndarray],
        num_pages: int,
        progress: Progress = silent,
    ):
        self.page_size, self.model = config.page_size, model
        _use_cache(config)
        counter = compile_counter()
        self._segments = pool.segment_sizes(num_pages)
        self.shapes = lattice(config.max_num_batched_tokens, config.max_num_seqs, self._segments, config.token_buckets)
        on_device = device_weights(model, weights, config.dtype)
        self._split = split(Decoder(model, on_device))
        twin = config.single_token_weights
        if twin is None:
            twin = jax.default_backend() == "cpu"
        self._split_single = (
            split(Decoder(model, transpose_weights(model, on_device), transposed=True)) if twin else self._split
        )
        self._pool = pool.create(model, self._segments, config.page_size, config.dtype)
        self._table = penalties.PenaltyTable.empty(config.max_num_seqs, model.vocab_size)
        self._compile(progress)
        self._warm_up()
        self.compiled = counter.count
        self._counter = counter

    @property
    def zones(self) -> list[int]:
        """Where the pool's segments end, in pages: a step that stays below reads less."""
        return np.cumsum(self._segments).tolist()

    @property
    def compilations_after_warmup(self) -> int:
        return self._counter.count - self.compiled

    def _of(self, shape: BatchShape) -> tuple[Any, Any, tuple[jax.Array, ...]]:
        return self._split_single if shape.tokens == 1 else self._split

    def _compile(self, progress: Progress) -> None:
        def step(shape: BatchShape) -> Any:
            graph, treedef, leaves = self._of(shape)
            fn = make_step(graph, treedef, shape, self.page_size)
            buffer = jax.ShapeDtypeStruct((shape.size,), jnp.int32)
            # Full float32 products: GPUs would otherwise round to TF32 and break exactness.
            with jax.default_matmul_precision("float32"):
                lowered = jax.jit(fn, donate_argnums=1).lower(leaves, self._pool, self._table, buffer)
            return lowered.compile()

        jobs: list[tuple[str, Callable[[], Any]]] = [(f"step of {s.tokens}", partial(step, s)) for s in self.shapes]
        jobs += [("penalty rows", self._compile_reset), ("penalties", self._compile_update)]
        done = 0

        def report(name: str) -> None:
            nonlocal done
            done += 1
            progress(name, done, len(jobs))

        progress("compiling", 0, len(jobs))
        *steps, self._reset, self._update = compile_all(jobs, report, threads=min(4, os.cpu_count() or 1))
        self._steps = dict(zip(self.shapes, steps, strict=True))

    def _compile_reset(self) -> Any:
        row = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(penalties.reset, donate_argnums=0).lower(self._table, row).compile()

    def _compile_update(self) -> Any:
        ints = jax.ShapeDtypeStruct((penalties.UPDATE,), jnp.int32)
        flags = jax.ShapeDtypeStruct((penalties.UPDATE,), jnp.bool_)
        floats = jax.ShapeDtypeStruct((penalties.UPDATE,), jnp.float32)
        lowered = jax.jit(penalties.update, donate_argnums=0).lower(self._table, ints, ints, ints, flags, floats)
        return lowered.compile()

    def _warm_up(self) -> None:
        """Run every program once on padding, so that first requests meet no lazy initialisation."""
        for shape in self.shapes:
            self.launch(pack([], [shape], self.page_size)).read()
        self.clear_penalties(0)

    def pack(self, trees: Sequence[Tree]) -> Packed:
        return pack(trees, self.shapes, self.page_size)

    def launch(self, packed: Packed) -> Flight:
        """Start a step; returns before it is done."""
        leaves = self._of(packed.shape)[2]
        self._pool, result = self._steps[packed.shape](leaves, self._pool, self._table, packed.buffer)
        return Flight(packed, result)

    def clear_penalties(self, row: int) -> None:
        self._table = self._reset(self._table, np.int32(row))

    def add_penalties(
        self, row: int, tokens: Sequence[int], count: int = 0, prompt: bool = False, bias: Sequence[float] | None = None
    ) -> None:
        """Tell the table about tokens of a row: generated (`count` 1), of the prompt, or biased."""
        for i in range(0, len(tokens), penalties.UPDATE):
            part = np.full(penalties.UPDATE, self.model.vocab_size, np.int32)
            part[: len(tokens[i : i + penalties.UPDATE])] = tokens[i : i + penalties.UPDATE]
            biases = np.zeros(penalties.UPDATE, np.float32)
            if bias is not None:
                biases[: len(bias[i : i + penalties.UPDATE])] = bias[i : i + penalties.UPDATE]
            rows, counts = np.full_like(part, row), np.full_like(part, count)
            self._table = self._update(self._table, rows, part, counts, np.full(len(part), prompt), biases)


def _use_cache(config: EngineConfig) -> None:
    """Point JAX's persistent compilation cache at our folder, unless the user's environment already names one."""
    folder = config.compilation_cache
    if folder == "" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    base = Path(os.environ.get("JAXSPEC_CACHE") or Path.home() / ".cache" / "jaxspec")
    jax.config.update("jax_compilation_cache_dir", folder or str(base / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
