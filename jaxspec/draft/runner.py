"""A draft model on the device: weights, KV pool and compiled draft rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.compilation import compile_ahead
from jaxspec.draft.growth import Beam, Growth
from jaxspec.draft.round import MOVING, Drafted, Staged, make_round
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.weights import Weights, of_target
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.policy import DEPTH
from jaxspec.step.addresses import Executable, ProgramSpec
from jaxspec.step.ahead import Chains, NewTokens
from jaxspec.step.batch import BatchBuffers, BatchShape
from jaxspec.step.kv_cache import KVCache, emptied
from jaxspec.step.layers import Layers
from jaxspec.step.packing import Tree, pack
from jaxspec.step.profiles import NOT_KEPT, ProfileStore
from jaxspec.step.programs import Programs
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.step import split
from jaxspec.step.tensor_parallel import bytes_on_devices
from jaxspec.step.warmup import CompileJob

#: A `jax.Device`, which type checkers take for a variable.
Device = Any
#: The beams that are compiled: a chain and a tree.
BEAMS = Beam(1), Beam(4)
#: Numbers of levels whose rounds are timed; the times of others are interpolated linearly.
_TIMED = (1, 3)
#: Uncached tokens that the first small round to be compiled has room for.
_FEW = 8
#: Rounds of a program that may have started before the results of the first are read.
_UNREAD = 4


def round_buckets(
    max_tokens: int, max_requests: int, pages: int, fine: bool = False, small: bool = False
) -> list[BatchShape]:
    """Shapes of rounds, sorted by requests, then tokens: for each batch size one for few uncached tokens (decode) and
    one for `max_tokens` (prefill).

    `fine` adds halves and quarters of batches, so that a micro-batch takes a fraction of the time; `small` adds rounds
    with fewer uncached tokens (`StepSizes.small_rounds`).
    """
    sizes = [(1, 8), (1, 64), (4, 32), (16, 64), (64, 256), (256, 512), (1024, 2048)]
    if fine:
        sizes += [(requests, 2 * requests) for requests in (2, 4, 8, 16, 32, 64, 128)]
    if small:
        sizes += [(1, 2), (1, 4), (4, 8), (16, 32)]
    shapes = set()
    for requests, tokens in sizes:
        r = min(requests, max_requests)
        shapes |= {BatchShape(min(tokens, max_tokens), r, r, pages), BatchShape(max_tokens, r, r, pages)}
    return sorted(shapes, key=lambda s: (s.trees, s.tokens))


class TargetModel(Protocol):
    """The target's state that rounds use: they read `features` and write the distributions of drafts to `drawn`.

    `ends`: its embedding `embed` and its `head` on the device, which drafters may share. `nothing_before`: stands for a
    step under way where there is none; None: there never is one.
    """

    drawn: DraftDistributions
    ends: Mapping[str, jax.Array]
    nothing_before: NewTokens | None

    @property
    def features(self) -> jax.Array: ...


class DraftRunner:
    """Runs draft rounds of one draft model, with the page numbers of the target's requests. Not thread-safe.

    On its own `device` it shares only page numbers with the target. `prefetch_features` copies the target's features
    before the target's step starts: a running step owns the feature pool.
    """

    def __init__(
        self, name: str, config: DecoderConfig, weights: Weights, target: TargetModel, layers: Layers,
        shapes: Sequence[BatchShape], num_pages: int, page_size: int, dtype: str, growths: Sequence[Growth] = BEAMS,
        device: Device | None = None, store: ProfileStore = NOT_KEPT,
    ):  # fmt: skip
        """`growths`: one per tree width to compile; `store`: keeps measured times."""
        self.name, self.page_size, self.shapes = name, page_size, list(shapes)
        self._target, self._layers = target, layers
        self._growths = {g.width: g for g in growths}
        #: Whether it runs on another device than the target.
        self.own_device = device is not None and device not in target.features.devices()
        self._device = device if self.own_device else None
        # The target's KV pool has taken all memory of its device: nothing of the drafter may pass through it.
        with jax.default_device(self._device) if self.own_device else nullcontext():
            shared = () if self.own_device else of_target(weights)
            model = layers.drafter(config, weights, dtype, {name: target.ends[name] for name in shared})
            self.conditioned = model.conditioned
            self._graph, self._treedef, leaves = split(model)
            kv_cache = KVCache.zeros(layers.pooled(config), num_pages, page_size, dtype, zeros=layers.zeros)
            features = target.features
            rows = jnp.zeros((self.most_tokens if self.own_device else 0, features.shape[-1]), features.dtype)
            state = leaves, kv_cache, DraftDistributions.empty(), rows, target.nothing_before
        self._leaves, self.kv_cache, self.drawn, self._rows, self._nothing_before = (
            jax.device_put(state, self._device) if self.own_device else state
        )
        self._buffers = BatchBuffers(self.shapes)
        timed = list(product(self.shapes, self.widths, _TIMED))
        larger = [(_title(*a), _title(*b)) for a in timed for b in timed if _at_most_as_long(a, b)]
        runs = {s: {_title(*r): partial(self._run_empty, *r) for r in timed if r[0] == s} for s in self.shapes}
        sizes = [leaf.shape for leaf in self._leaves]
        key = (config, sizes, self.shapes, layers.version, str(self.kv_cache.keys.dtype), list(growths))
        self._rounds = Programs(f"rounds of {name}", key, runs, self._compile_rounds, store, larger)
        #: Measured seconds of rounds.
        self.profile = self._rounds.profile

    def held(self) -> dict[str, int]:
        """Bytes of its own weights and KV pool on each device, by the device's name."""
        own = [leaf for leaf in self._leaves if not any(leaf is end for end in self._target.ends.values())]
        return bytes_on_devices((own, self.kv_cache))

    def reset(self) -> None:
        """Empty its KV pool, which a failed round may have lost."""
        for of_shape in self._rounds.values():
            for program in of_shape.values():
                program.reset()
        with jax.default_device(self._device) if self.own_device else nullcontext():
            self.kv_cache = emptied(self.kv_cache)
            if self.own_device:
                self.drawn, self._rows = emptied((self.drawn, self._rows))

    def overwritten(self, pages: Sequence[int]) -> None:
        """Does nothing: the runner keeps no state per page (see `jaxspec.step.kv_host.Owner`)."""

    @property
    def widths(self) -> list[int]:
        """Widths of the trees it can grow, ascending."""
        return sorted(self._growths)

    @property
    def most_tokens(self) -> int:
        """Most uncached tokens per round."""
        return self.shapes[-1].tokens

    @property
    def usable(self) -> bool:
        """Whether the largest shape is ready: it fits every round."""
        return self.shapes[-1] in self._rounds.ready

    def jobs(self) -> tuple[list[CompileJob], list[CompileJob]]:
        """The compile jobs that the runner needs to be `usable`, and those that make it faster."""
        needed, more = [], []
        few = next(shape for shape in self.shapes if shape.tokens >= min(_FEW, self.most_tokens))
        if self.own_device and self.conditioned:
            needed.append(CompileJob(f"{self.name} features", self._compile_fetch))
        for shape in self.shapes:
            job = self._rounds.job(f"{self.name} {shape.trees}×{shape.tokens}", shape)
            (needed if shape in (few, self.shapes[-1]) else more).append(job)
        return needed, more

    def _compile_rounds(self, shape: BatchShape) -> dict[int, Executable]:
        """The compiled rounds of one shape, by tree width."""
        buffer, levels = jax.ShapeDtypeStruct((shape.size,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        features, before = self._features(shape, ()), self._nothing_before
        arguments = self._leaves, self.kv_cache, self._shared.drawn, features, buffer, levels, before
        programs: dict[int, Executable] = {}
        for width, growth in self._growths.items():
            one = make_round(self._graph, self._treedef, shape, self._layers, growth, DEPTH)
            spec = ProgramSpec.of(self._layers, one, arguments, 3, donate=[1, 2], moving=MOVING)
            programs[width] = Executable(self._layers, spec, _UNREAD, device=self._device)
        return programs

    def _compile_fetch(self) -> None:
        def fetch(features: jax.Array, slots: jax.Array) -> jax.Array:
            return features.reshape(-1, features.shape[-1]).at[slots].get(mode="fill", fill_value=0)

        slots = jax.ShapeDtypeStruct((self.most_tokens,), jnp.int32)
        self._fetch = compile_ahead(fetch, self._target.features, slots)

    def prefetch_features(self, slots: np.ndarray) -> None:
        """Copy features from these slots of the target's pool (page * page size + offset; negative: zeros)."""
        padded = np.full(self.most_tokens, self._target.features.shape[0] * self.page_size, np.int32)
        padded[: len(slots)] = np.where(slots < 0, padded[0], slots)
        self._rows = jax.device_put(self._fetch(self._target.features, padded), self._device)

    def _features(self, shape: BatchShape, staged: Sequence[range]) -> jax.Array | Staged:
        if not self.own_device:
            return self._target.features
        origin = np.full(shape.tokens, self.most_tokens, np.int32)
        rows = np.asarray([row for of_chain in staged for row in of_chain], np.int32)
        origin[: len(rows)] = rows
        return Staged(self._rows, origin)

    @property
    def _shared(self) -> DraftRunner | TargetModel:
        """The owner of the `drawn` that rounds write."""
        return self if self.own_device else self._target

    def seconds(self, requests: int, tokens: int, levels: int, width: int) -> float:
        """Measured time of a round with `tokens` uncached tokens, by its shape, levels and width."""
        ready = self._rounds.ready
        shape = next((s for s in ready if s.trees >= requests and s.tokens >= tokens), ready[-1])
        first, third = (self.profile.seconds[_title(shape, width, n)] for n in _TIMED)
        return first + max(third - first, 0.0) / 2 * (levels - 1)

    def _run_empty(self, shape: BatchShape, width: int, levels: int) -> None:
        packed = pack([], [shape], self._buffers, self.page_size)
        jax.block_until_ready(self._run(packed.buffer, shape, width, levels).out)

    def _run(
        self, buffer: np.ndarray, shape: BatchShape, width: int, levels: int, staged: Sequence[range] = (),
        before: NewTokens | None = None,
    ) -> Drafted:  # fmt: skip
        shared, features = self._shared, self._features(shape, staged)
        self.kv_cache, shared.drawn, drafted = self._rounds[shape][width](
            self._leaves, self.kv_cache, shared.drawn, features, buffer, np.int32(levels),
            self._nothing_before if before is None else before,
        )  # fmt: skip
        return drafted

    def start(
        self, chains: Sequence[Tree], levels: int, width: int, staged: Sequence[range] = ()
    ) -> Callable[[], list[Candidates]]:
        """Start a round: compute KV for `chains` (each request's tokens from its watermark on), grow trees from their
        ends.

        `staged`: the prefetched feature rows of each chain, for a `conditioned` runner on its own device. `width` is
        rounded up to one of `widths`. Returns a function that waits for the candidates of each chain: `levels * width`
        nodes in level order, none if `levels` is 0.
        """
        width = next(w for w in self.widths if w >= min(width, self.widths[-1]))
        packed = pack(chains, self._rounds.ready, self._buffers, self.page_size)
        drafted = self._run(packed.buffer, packed.shape, width, levels, staged)
        return lambda: self._read(drafted.out, len(chains), levels, width)

    def start_ahead(
        self, chains: Sequence[Tree], levels: int, before: NewTokens | None
    ) -> tuple[Chains | None, Callable[[], list[Candidates]]]:
        """Start a round of chains of drafts for a step that is launched before the host has read them.

        `before`: new tokens of the step that `chains` follow, see `jaxspec.step.ahead`. Returns the drafts on the
        device, and what reads them, as with `start`.
        """
        width = self.widths[0]
        packed = pack(chains, self._rounds.ready, self._buffers, self.page_size)
        drafted = self._run(packed.buffer, packed.shape, width, levels, before=before)
        if jax.default_backend() != "cpu":  # there it takes 0.2 ms and copies nothing
            drafted.out.copy_to_host_async()
        return drafted.chains, lambda: self._read(drafted.out, len(chains), levels, width)

    def _read(self, out: jax.Array, count: int, levels: int, width: int) -> list[Candidates]:
        if levels == 0:
            return [Candidates(*_NO_NODES)] * count
        token, parent_column, bits = np.asarray(out)[:, :count, :levels]  # [R, levels, W] each
        parent = parent_column + (np.arange(levels, dtype=np.int32) * width - width)[:, None]
        parent[:, 0] = -1
        logprob = bits.view(np.float32)
        drawn: list[np.ndarray | None] = [None] * count
        if self._growths[width].draws:
            # Row of the flattened `DraftDistributions.logits` of each node: its request, level and parent's index.
            row = parent_column + width * (np.arange(levels)[:, None] + DEPTH * np.arange(count)[:, None, None])
            drawn = list(row.astype(np.int32))
        return [
            Candidates(token[i].ravel(), parent[i].ravel(), logprob[i].ravel(), None if d is None else d.ravel())
            for i, d in enumerate(drawn)
        ]


_NO_NODES = np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)


def _title(shape: BatchShape, width: int, levels: int) -> str:
    """A round's name in the profile."""
    return f"{shape.trees}×{shape.tokens} width {width} levels {levels}"


def _at_most_as_long(a: tuple[BatchShape, int, int], b: tuple[BatchShape, int, int]) -> bool:
    """Whether round `a` cannot take longer than `b`: they differ only in levels or tokens, and `a` has fewer."""
    (s, width, levels), (t, *other) = a, b
    if s == t:
        return width == other[0] and levels < other[1]
    return [width, levels] == other and s.trees == t.trees and s.tokens < t.tokens
