"""Executes steps of the target model: owns its weights, KV cache, penalty table and compiled steps."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.kernels import cpu
from jaxspec.kernels.build import KernelsUnavailable
from jaxspec.models.config import DecoderConfig
from jaxspec.paths import cache_folder
from jaxspec.sched.spec.micro_batches import MAX_MICRO_BATCHES
from jaxspec.sched.timing import StepTimes, between
from jaxspec.step import penalties
from jaxspec.step.batch import BatchBuffers, BatchShape
from jaxspec.step.buckets import needed_first, step_buckets
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.kv_int8 import AnyKVCache, Int8KVCache, OpenPages, most_written
from jaxspec.step.layers import Layers
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import Packed, Tree, pack
from jaxspec.step.profiles import NOT_KEPT, ProfileStore
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.sampler import Logprobs
from jaxspec.step.step import StepResult, make_step, split
from jaxspec.step.warmup import CompileJob, WarmUp, compile_counter
from jaxspec.step.xla import XlaLayers

log = logging.getLogger(__name__)

#: Steps of up to this many tokens decode and verify drafts: they are needed most and compiled before larger ones.
_SMALL = 32


class PendingStep:
    """A step in flight on the device; `wait` blocks until it is done."""

    def __init__(self, packed: Packed, result: StepResult):
        self.packed, self._result = packed, result

    def wait(self) -> np.ndarray:
        """Wait for the step. Returns `StepResult.decision [C + T]` int32: sampled tokens, then accepted flags."""
        return np.asarray(self._result.decision)

    @cached_property
    def logprobs(self) -> Logprobs | None:
        """Log-probabilities of all logit rows as numpy, transferred once; None if no tree needs them."""
        return jax.device_get(self._result.logprobs) if self.packed.logprobs else None


class ModelRunner:
    """Runs packed steps of the target model, each padded to the smallest compiled shape (`ready`).

    `__init__` compiles and measures all shapes, unless `warm_up` compiles in the background. Not thread-safe: only the
    engine's thread may call it, also to adopt programs compiled in the background.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderConfig,
        weights: dict[str, np.ndarray],
        num_pages: int,
        warm_up: WarmUp | None = None,
        features: bool = False,
        drawn: DraftDistributions | None = None,
        store: ProfileStore = NOT_KEPT,
    ):
        """`num_pages`: pages of the KV cache; `features`: keep a feature pool; `drawn`: storage for draft distributions
        (`acceptance: rejection`); `store`: where measured times are kept."""
        self.page_size, self.model = config.page_size, model
        warm_up = warm_up or WarmUp()
        _use_cache(config)
        counter = compile_counter()
        longest = min(config.max_model_len or model.max_position, model.max_position)
        pages = min(num_pages, -(-longest // config.page_size))
        self._open_pages = OpenPages(config.max_num_seqs) if config.kv_cache_dtype == "int8" else None
        #: Distributions that the next step's drafts were drawn from (`acceptance: rejection`); drafters write them.
        self.drawn = drawn or DraftDistributions.empty()
        self.shapes = step_buckets(
            config.max_num_batched_tokens, config.max_num_seqs, pages, config.token_buckets, self.drawn.logits.shape[2],
            partial(most_written, page_size=config.page_size) if self._open_pages else None,
        )  # fmt: skip
        micro_batches = config.micro_batches or (MAX_MICRO_BATCHES if config.draft_devices else 1)
        self._buffers = BatchBuffers(self.shapes, micro_batches + 1)
        self.layers = pick_layers(config, model)
        self._graph, self._treedef, self._leaves = split(self.layers.decoder(model, weights, config.dtype))
        self.kv_cache = self._new_kv_cache(config, num_pages, features)
        self._table = penalties.PenaltyTable.empty(config.max_num_seqs, model.vocab_size)
        # Steps are compiled from shapes: the arrays may be donated while the background thread compiles.
        arguments = self._leaves, self.kv_cache, self._table, self.drawn
        self._abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        self._counter = counter
        #: Compiled shapes, ascending.
        self.ready: list[BatchShape] = []
        self._steps: dict[BatchShape, Any] = {}
        names = [str(shape.tokens) for shape in self.shapes]
        key = (model, self.shapes, self.layers.version, config.dtype)
        #: Measured seconds per step, by number of tokens, without committed KV.
        self.profile = store.open("step", key, names, list(itertools.pairwise(names)))
        #: Estimated seconds per step for the ready shapes, updated by observed steps.
        self.times: StepTimes
        self._compile(warm_up)
        self.startup_done()

    @property
    def compilations_after_warmup(self) -> int:
        """Compilations since `startup_done`, without planned ones."""
        return self._counter.count - self.compiled

    def startup_done(self) -> None:
        """Startup is over: compilations from now on, except planned ones, delay requests and are counted."""
        self.compiled = self._counter.count

    @property
    def features(self) -> jax.Array:
        """Feature pool `[pages, page_size, hidden]`: final hidden states of committed positions, for drafters."""
        return self.kv_cache.features

    def _new_kv_cache(self, config: EngineConfig, pages: int, features: bool) -> AnyKVCache:
        sizes = self.model, pages, config.page_size, config.dtype, features
        zeros = self.layers.zeros
        return (
            Int8KVCache.zeros(*sizes, config.max_num_seqs, zeros) if self._open_pages else KVCache.zeros(*sizes, zeros)
        )

    def overwritten(self, pages: Sequence[int]) -> None:
        """Report pages of the KV cache that something other than a step has written."""
        if self._open_pages:
            self._open_pages.forget(pages)

    def _compile(self, warm_up: WarmUp) -> None:
        first = needed_first(self.shapes) if warm_up.background else self.shapes
        self._started = False
        self.profile.on_guess.append(self._mark_ready)
        jobs = [
            CompileJob(f"step of {s.tokens}", partial(self._compile_step, s), partial(self._adopt, s))
            for s in self.shapes
        ]
        penalty_job = CompileJob("penalties", self._compile_penalties, self._adopt_penalties)
        warm_up.compile_now("compiling steps", [penalty_job, *(jobs[self.shapes.index(s)] for s in first)])
        self.profile.guess()
        self.times = times = StepTimes(self._times())
        self._started = True
        self.profile.on_measured.append(lambda: times.learn(self._times()))
        small, large = [], []
        for shape, job in zip(self.shapes, jobs, strict=True):
            if shape not in first:
                (small if shape.tokens <= _SMALL else large).append(job)
        warm_up.compile_later("compiling steps", small, rank=0)
        warm_up.compile_later("compiling steps", large, rank=3)
        warm_up.measure(self.profile)

    def _compile_step(self, shape: BatchShape) -> Any:
        fn = make_step(self._graph, self._treedef, shape, self.layers)
        buffer = jax.ShapeDtypeStruct((shape.size,), jnp.int32)
        # Full float32 products: GPUs use TF32 by default, which breaks exactness.
        with jax.default_matmul_precision("float32"):
            lowered = jax.jit(fn, donate_argnums=1).lower(*self._abstract, buffer)
        return lowered.compile()

    def _adopt(self, shape: BatchShape, program: Any) -> None:
        """Store a compiled step. It is used as soon as there is a time for it."""
        self._steps[shape] = program
        known = {int(size): seconds for size, seconds in self.profile.seconds.items()}
        guess = None
        # On an accelerator the first run of a program initialises it, so it runs once before requests use it. On CPU
        # that is not needed: the time is interpolated between the smallest and the largest shape, compiled before.
        if jax.default_backend() == "cpu" and known and min(known) < shape.tokens < max(known):
            guess = between(known, shape.tokens)
        self.profile.offer(str(shape.tokens), partial(self._run_empty, shape), guess)
        if str(shape.tokens) in self.profile.seconds:
            self._mark_ready(str(shape.tokens))

    def _mark_ready(self, size: str) -> None:
        """The step of `size` tokens is compiled and has a time."""
        self.ready = [s for s in self.shapes if s in self._steps and str(s.tokens) in self.profile.seconds]
        if self._started:
            self.times.learn({int(size): self.profile.seconds[size]})

    def _times(self) -> dict[int, float]:
        return {shape.tokens: self.profile.seconds[str(shape.tokens)] for shape in self.ready}

    def _compile_penalties(self) -> tuple[Any, Any]:
        return self._compile_reset(), self._compile_update()

    def _adopt_penalties(self, programs: tuple[Any, Any]) -> None:
        self._reset, self._update = programs
        self.clear_penalties(0)

    def _compile_reset(self) -> Any:
        row = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(penalties.reset, donate_argnums=0).lower(self._table, row).compile()

    def _compile_update(self) -> Any:
        ints = jax.ShapeDtypeStruct((penalties.UPDATE,), jnp.int32)
        flags = jax.ShapeDtypeStruct((penalties.UPDATE,), jnp.bool_)
        floats = jax.ShapeDtypeStruct((penalties.UPDATE,), jnp.float32)
        lowered = jax.jit(penalties.update, donate_argnums=0).lower(self._table, ints, ints, ints, flags, floats)
        return lowered.compile()

    def _run_empty(self, shape: BatchShape) -> None:
        self.execute(pack([], [shape], self._buffers, self.page_size)).wait()

    def pack(self, trees: Sequence[Tree]) -> Packed:
        """Pack trees into a compiled shape, see `packing.pack`."""
        return pack(trees, self.ready, self._buffers, self.page_size, self._open_pages)

    def positions_read(self, packed: Packed) -> int:
        """Committed positions that the step reads per layer, padding included."""
        return self.layers.positions_read(packed.committed, self.page_size)

    def execute(self, packed: Packed) -> PendingStep:
        """Start a step. Returns without waiting for it."""
        program = self._steps[packed.shape]
        self.kv_cache, result = program(self._leaves, self.kv_cache, self._table, self.drawn, packed.buffer)
        return PendingStep(packed, result)

    def clear_penalties(self, row: int) -> None:
        """Zero a row of the penalty table."""
        self._table = self._reset(self._table, np.int32(row))

    def add_penalties(
        self, row: int, tokens: Sequence[int], count: int = 0, prompt: bool = False, bias: Sequence[float] | None = None
    ) -> None:
        """Add tokens to a row of the penalty table: generated (`count` 1), in the prompt, or biased."""
        for i in range(0, len(tokens), penalties.UPDATE):
            part = np.full(penalties.UPDATE, self.model.vocab_size, np.int32)
            part[: len(tokens[i : i + penalties.UPDATE])] = tokens[i : i + penalties.UPDATE]
            biases = np.zeros(penalties.UPDATE, np.float32)
            if bias is not None:
                biases[: len(bias[i : i + penalties.UPDATE])] = bias[i : i + penalties.UPDATE]
            rows, counts = np.full_like(part, row), np.full_like(part, count)
            self._table = self._update(self._table, rows, part, counts, np.full(len(part), prompt), biases)


def pick_layers(config: EngineConfig, model: DecoderConfig) -> Layers:
    """Select the CPU kernels if they support this model and machine, else XLA.

    Raises `ConfigError` if `kernels: native` is configured and they do not.
    """
    if config.kernels == "xla":
        return XlaLayers()
    reason = None
    if jax.default_backend() != "cpu":
        reason = f"they run on CPU, not on {jax.default_backend()}"
    elif config.dtype != "float32":
        reason = f"they compute in float32, not {config.dtype}"
    elif not cpu.supports(model.num_heads, model.num_kv_heads, model.head_dim, config.page_size):
        reason = f"they do not support heads of {model.head_dim} in pages of {config.page_size}"
    else:
        try:
            cpu.load()
            return NativeLayers()
        except KernelsUnavailable as error:
            reason = str(error)
            log.warning("serving without the CPU kernels, at a fraction of the speed: %s", reason)
    if config.kernels == "native":
        raise ConfigError(f"kernels: the CPU kernels are not available: {reason}")
    return XlaLayers()


def _use_cache(config: EngineConfig) -> None:
    """Set JAX's persistent compilation cache folder, unless `JAX_COMPILATION_CACHE_DIR` is set."""
    folder = config.compilation_cache_dir
    if folder == "" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    jax.config.update("jax_compilation_cache_dir", folder or str(cache_folder("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
