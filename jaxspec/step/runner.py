"""Executes steps of the target model: owns its weights, KV cache, penalty table and compiled steps."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.compilation import compile_counter, use_cache
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.kernels import cpu
from jaxspec.kernels.build import KernelsUnavailable
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.weights import Weights
from jaxspec.sched.spec.micro_batches import MAX_MICRO_BATCHES
from jaxspec.sched.spec.trees.policy import DEPTH
from jaxspec.sched.timing import StepTimes, between
from jaxspec.step.addresses import Executable, ProgramSpec
from jaxspec.step.ahead import NewTokens
from jaxspec.step.batch import BatchBuffers, BatchShape
from jaxspec.step.buckets import needed_first, step_buckets
from jaxspec.step.kv_cache import KVCache, emptied, page_bytes, stored_as
from jaxspec.step.kv_int8 import AnyKVCache, Int8KVCache, OpenPages, most_written
from jaxspec.step.layers import Layers
from jaxspec.step.masks import MaskBuffers
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import Packed, SamplingInputs, Tree, pack
from jaxspec.step.penalties import Penalties
from jaxspec.step.profiles import NOT_KEPT, ProfileStore
from jaxspec.step.programs import Programs
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.sampler import Logprobs
from jaxspec.step.step import MOVING, StepResult, make_step, split
from jaxspec.step.tensor_parallel import bytes_on_devices, copied, parallel_over
from jaxspec.step.warmup import WarmUp
from jaxspec.step.xla import XlaLayers

log = logging.getLogger(__name__)

#: Committed positions that profiled runs with a context read: their KV has this share of the weights' bytes, so that
#: reading them takes a time that can be measured next to that of the step.
_READ_SHARE = 0.25
#: Steps of up to this many tokens decode and verify drafts: they are needed most and compiled before larger ones.
_SMALL = 32


class PendingStep:
    """A step in flight on the device; `wait` blocks until it is done."""

    def __init__(self, packed: Packed, result: StepResult):
        self.packed, self._result = packed, result

    @property
    def new(self) -> NewTokens:
        """Its trees' new tokens on the device, for the next step."""
        assert self._result.new is not None
        return self._result.new

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
        weights: Weights,
        num_pages: int,
        warm_up: WarmUp | None = None,
        features: bool = False,
        drawn: DraftDistributions | None = None,
        store: ProfileStore = NOT_KEPT,
        layers: Layers | None = None,
        one_graph: bool = True,
    ):
        """`num_pages`: pages of the KV cache; `features`: keep a feature pool; `drawn`: storage for draft distributions
        (`acceptance: rejection`); `store`: where measured times are kept; `layers`: instead of those that
        `pick_layers` selects; `one_graph`: see `compile_ahead`."""
        self.page_size, self._model = config.page_size, model
        warm_up = warm_up or WarmUp()
        use_cache(config.compilation_cache_dir)
        self._counter = compile_counter()
        longest = min(config.max_model_len or model.max_position, model.max_position)
        pages = min(num_pages, -(-longest // config.page_size))
        self._open_pages = OpenPages(config.max_num_seqs) if config.kv_cache_dtype == "int8" else None
        self.layers = layers or pick_layers(config, model)
        #: Distributions that the next step's drafts were drawn from (`acceptance: rejection`); drafters write them.
        self.drawn = copied(self.layers.parallel, drawn or DraftDistributions.empty())
        self._drawn_vocab, self._max_num_seqs = np.asarray(self.drawn.vocab), config.max_num_seqs
        self.shapes = step_buckets(
            config.token_budget, config.max_num_seqs, pages, config.token_buckets, self.drawn.logits.shape[2],
            partial(most_written, page_size=config.page_size) if self._open_pages else None, self.layers.sizes,
        )  # fmt: skip
        micro_batches = config.micro_batches or (MAX_MICRO_BATCHES if config.draft_devices else 1)
        self._one_graph = one_graph
        self._async_copies = jax.default_backend() != "cpu"  # there it takes 0.2 ms and copies nothing
        self._under_way = under_way = micro_batches + 1  # with the step before
        self._buffers = BatchBuffers(self.shapes, under_way + 1)
        self._masks = MaskBuffers(model.vocab_size, under_way + 1)
        trees = max(shape.trees for shape in self.shapes)
        #: For steps and rounds of which the host knows all tokens; None if there are no others.
        self.nothing_before = NewTokens.none(trees, self.layers.zeros) if config.async_scheduling else None
        self._no_chains = self.layers.zeros([trees, DEPTH], jnp.int32) if config.async_scheduling else None
        decoder = self.layers.decoder(model, weights, config.dtype)
        #: Embedding and head on the device.
        self.ends: Mapping[str, jax.Array] = {"embed": decoder.embedding.get_value(), "head": decoder.head.get_value()}
        self._graph, self._treedef, self._leaves = split(decoder)
        sizes = self.layers.pooled(model), num_pages, config.page_size
        kind = stored_as(config, config.dtype)
        if self._open_pages:
            open_pages = config.dtype, features, config.max_num_seqs
            self.kv_cache: AnyKVCache = Int8KVCache.zeros(*sizes, *open_pages, self.layers.zeros)
        else:
            self.kv_cache = KVCache.zeros(*sizes, kind, features, self.layers.zeros)
        #: Penalties of running requests.
        self.penalties = Penalties(config.max_num_seqs, model.vocab_size, self.layers.zeros)
        runs = {shape: {self._title(shape): partial(self._run_empty, shape)} for shape in self.shapes}
        #: Committed positions that profiled runs read, by name of the run and of the same step without them.
        self._reading: dict[tuple[str, str], int] = {}
        if not self._open_pages and pages > 1:
            for shape in needed_first(self.shapes)[:2]:
                trees = self._context_trees(shape, num_pages, page_bytes(model, config.page_size, kind))
                read, plain = sum(tree.committed for tree in trees), self._title(shape)
                runs[shape][f"{plain} reading {read}"] = partial(self._run_reading, shape, trees)
                self._reading[f"{plain} reading {read}", plain] = read
        key = (model, self.shapes, self.layers.version, config.dtype, kind)
        ascending = [
            (self._title(a), self._title(b)) for a, b in itertools.pairwise(self.shapes) if a.tokens < b.tokens
        ]
        self._steps = Programs("step", key, runs, self._compile_step, store, ascending, self._guess)
        #: Measured seconds per step, by number of tokens, without committed KV; of some also with it.
        self.profile = self._steps.profile
        #: Estimated seconds per step for the ready shapes, updated by observed steps.
        self.times: StepTimes
        self._compile(warm_up)
        self.startup_done()

    @property
    def ready(self) -> list[BatchShape]:
        """Shapes that are compiled and have a time, ascending."""
        return self._steps.ready

    @property
    def compilations_after_warmup(self) -> int:
        """Compilations since `startup_done`, without planned ones."""
        return self._counter.count - self.compiled

    def startup_done(self) -> None:
        """Startup is over: compilations from now on, except planned ones, delay requests and are counted."""
        self.compiled = self._counter.count

    @property
    def features(self) -> jax.Array:
        """Feature pool `[pages, page_size, TAPS * hidden]` of committed positions (`jaxspec.models.drafter`)."""
        return self.kv_cache.features

    def held(self) -> dict[str, int]:
        """Bytes of weights, KV pool and tables on each device, by the device's name."""
        return bytes_on_devices((self._leaves, self.kv_cache, self.penalties.table, self.drawn))

    def reset(self) -> None:
        """Empty KV cache, penalty table and draft distributions, which a failed step or draft round may have lost."""
        if self._open_pages:
            self._open_pages = OpenPages(self._max_num_seqs)
        self.kv_cache = emptied(self.kv_cache)
        for program in self._steps.values():
            program.reset()
        self.penalties.clear()
        logits, vocab = self.drawn
        self.drawn = DraftDistributions(emptied(logits), jax.device_put(self._drawn_vocab, vocab.sharding))

    def overwritten(self, pages: Sequence[int]) -> None:
        """Report pages of the KV cache that something other than a step has written."""
        if self._open_pages:
            self._open_pages.forget(pages)

    def _compile(self, warm_up: WarmUp) -> None:
        first = needed_first(self.shapes) if warm_up.background else self.shapes
        jobs = {shape: self._steps.job(f"step of {self._title(shape)}", shape) for shape in self.shapes}
        warm_up.compile_now("compiling step programs", [self.penalties.job(), *(jobs.pop(shape) for shape in first)])
        self.profile.guess()
        ready = {shape.tokens: self.step_seconds[shape.tokens] for shape in self.ready}
        self.times = times = StepTimes(ready, self.position_seconds)
        self._steps.on_ready = lambda shape: times.learn({shape.tokens: self.step_seconds[shape.tokens]})
        # All shapes are ready then.
        self.profile.on_measured.append(lambda: times.learn(self.step_seconds, self.position_seconds))
        for shape, job in jobs.items():
            warm_up.compile_later("compiling step programs", [job], rank=0 if shape.tokens <= _SMALL else 3)
        warm_up.measure(self.profile)

    def _compile_step(self, shape: BatchShape) -> Executable:
        step = make_step(self._graph, self._treedef, shape, self.layers)
        buffer = jax.ShapeDtypeStruct((shape.size,), jnp.int32)
        masks = self._masks.shape(shape.rows)
        ahead = self.nothing_before, self._no_chains
        arguments = self._leaves, self.kv_cache, self.penalties.table, self.drawn, buffer, masks, *ahead
        spec = ProgramSpec.of(self.layers, step, arguments, 2, donate=[1], moving=MOVING)
        return Executable(self.layers, spec, self._under_way, self._one_graph)

    def _title(self, shape: BatchShape) -> str:
        """Unique name of a shape's program: its number of tokens, and its pages if they are not the most."""
        few = shape.pages < self.shapes[-1].pages
        return f"{shape.tokens} ({shape.pages} pages)" if few else str(shape.tokens)

    def _guess(self, shape: BatchShape) -> float | None:
        # On an accelerator the first run of a program initialises it, so it runs once before requests use it. On CPU
        # that is not needed: the time is interpolated between the smallest and the largest shape, compiled before.
        known = self.step_seconds
        if jax.default_backend() == "cpu" and known and min(known) < shape.tokens < max(known):
            return between(known, shape.tokens)
        return None

    @property
    def step_seconds(self) -> dict[int, float]:
        """Seconds in `profile` by number of tokens, without committed KV; of several page tables, the shortest."""
        found: dict[int, float] = {}
        for shape in self.shapes:
            if (seconds := self.profile.seconds.get(self._title(shape))) is not None:
                found[shape.tokens] = min(seconds, found.get(shape.tokens, seconds))
        return found

    @property
    def position_seconds(self) -> float:
        """Seconds in `profile` per committed position; 0 as long as they are not measured."""
        seconds = self.profile.seconds
        longer = [seconds[reading] - seconds[plain] for reading, plain in self._reading]
        return max(0.0, sum(longer)) / max(1, sum(self._reading.values()))

    def _context_trees(self, shape: BatchShape, num_pages: int, page_bytes: int) -> list[Tree]:
        """Decoding requests with committed positions, as many as `shape` holds: full pages, as different as may be."""
        wanted = _READ_SHARE * sum(leaf.nbytes for leaf in self._leaves) / page_bytes
        each = min(max(1, round(wanted / shape.trees)), shape.pages - 1, num_pages)
        tables = np.arange(shape.trees * each, dtype=np.int32).reshape(-1, each) % num_pages
        committed, sampling = each * self.page_size, SamplingInputs()
        return [Tree.chain([0], committed, np.append(pages, pages[:1]), sampling) for pages in tables]

    def _run_empty(self, shape: BatchShape) -> None:
        self.execute(self._varied(pack([], [shape], self._buffers, self.page_size))).wait()

    def _run_reading(self, shape: BatchShape, trees: Sequence[Tree]) -> None:
        packed = pack(trees, [shape], self._buffers, self.page_size)
        offset, (tokens,), _ = shape.layout["slot"]
        packed.buffer[offset : offset + tokens] = -1  # the step stores no KV: the pages may hold that of requests
        self.execute(self._varied(packed)).wait()

    def _varied(self, packed: Packed) -> Packed:
        """The step with different tokens where that matters for its time: each wakes experts of its own."""
        if self._model.experts is not None:
            offset, (tokens,), _ = packed.shape.layout["token"]
            packed.buffer[offset : offset + tokens] = np.arange(tokens) * 7919 % self._model.vocab_size
        return packed

    def pack(self, trees: Sequence[Tree]) -> Packed:
        """Pack trees into a compiled shape, see `packing.pack`."""
        return pack(trees, self.ready, self._buffers, self.page_size, self._open_pages, self._masks)

    def positions_read(self, packed: Packed) -> int:
        """Committed positions that the step reads per layer, padding included."""
        return self.layers.positions_read(packed.committed, self.page_size)

    def execute(
        self, packed: Packed, before: PendingStep | None = None, chains: jax.Array | None = None
    ) -> PendingStep:
        """Start a step. Returns without waiting for it. Its negative tokens refer to the step `before` and to the
        `chains` of a draft round."""
        program = self._steps[packed.shape]
        masks = self._masks.unused(packed.shape.rows) if packed.masks is None else packed.masks
        self.kv_cache, result = program(
            self._leaves, self.kv_cache, self.penalties.table, self.drawn, packed.buffer, masks,
            self.nothing_before if before is None else before.new, self._no_chains if chains is None else chains,
        )  # fmt: skip
        if self._async_copies:
            result.decision.copy_to_host_async()
        return PendingStep(packed, result)


def pick_layers(config: EngineConfig, model: DecoderConfig) -> Layers:
    """Select the kernels for this device if they support the model, else XLA.

    Raises `ConfigError` if `kernels: native` is configured and the CPU kernels do not support it.
    """
    parallel = parallel_over(config.tensor_parallel_size)
    if config.kernels == "xla":
        return XlaLayers(parallel)
    if config.kernels == "auto" and jax.default_backend() == "gpu":
        from jaxspec.step.gpu import GpuLayers, supports  # Pallas takes long to import

        if supports(model):
            return GpuLayers(parallel=parallel)
    if config.kernels == "auto" and parallel is not None:
        return XlaLayers(parallel)
    reason = None
    if parallel is not None:
        reason = f"they run on one device, and tensor_parallel_size is {parallel.size}"
    elif jax.default_backend() != "cpu":
        reason = f"they run on CPU, not on {jax.default_backend()}"
    elif config.dtype != "float32":
        reason = f"they compute in float32, not {config.dtype}"
    elif not cpu.supports(model.num_heads, model.num_kv_heads, model.head_dim, config.page_size):
        reason = f"they do not support heads of {model.head_dim} in pages of {config.page_size}"
    else:
        try:
            cpu.load()
            return NativeLayers(config.batch_invariant)
        except KernelsUnavailable as error:
            reason = str(error)
            log.warning("serving without the CPU kernels, at a fraction of the speed: %s", reason)
    if config.kernels == "native":
        raise ConfigError(f"kernels: the CPU kernels are not available: {reason}")
    return XlaLayers()
