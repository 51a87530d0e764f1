"""A drafter on the device: its weights, its pool and its compiled rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.draft.growth import Beam, Growth
from jaxspec.draft.round import Staged, make_round
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.weights import Weights
from jaxspec.sched.speculator import DEPTH
from jaxspec.sched.trees.candidates import Candidates
from jaxspec.step.batch import BatchShape, Blanks
from jaxspec.step.layers import Layers
from jaxspec.step.packing import Tree, pack
from jaxspec.step.pool import Pool
from jaxspec.step.profiles import Profile, median_seconds, remembered
from jaxspec.step.rejection import Drawn
from jaxspec.step.target import split

#: A `jax.Device`; that name is a variable to type checkers.
Device = Any
#: The beams that are compiled: a chain, and a tree.
BEAMS = Beam(1), Beam(4)


def draft_lattice(max_tokens: int, max_requests: int, pages: int, fine: bool = False) -> list[BatchShape]:
    """Shapes of rounds, by requests and then tokens: few tokens to catch up with, or those of prompts.

    `fine`: for halves and quarters of batches too, so that a part of the requests takes a part of the time.
    """
    sizes = [(1, 8), (1, 64), (4, 32), (16, 64), (64, 256), (256, 512), (1024, 2048)]
    if fine:
        sizes += [(requests, 2 * requests) for requests in (2, 4, 8, 16, 32, 64, 128)]
    shapes = set()
    for requests, tokens in sizes:
        r = min(requests, max_requests)
        shapes |= {BatchShape(min(tokens, max_tokens), r, r, pages), BatchShape(max_tokens, r, r, pages)}
    return sorted(shapes, key=lambda s: (s.trees, s.tokens))


class Target(Protocol):
    """What drafting shares with the target's steps: it reads the features and writes what drafts are drawn from."""

    drawn: Drawn

    @property
    def features(self) -> jax.Array: ...


class DraftRunner:
    """Runs rounds of one drafter over the target's pages. Not thread-safe, like the executor it stands beside.

    On a `device` of its own it shares nothing with the target but the numbers of pages. The target's features are
    brought over by `stage`, because its pool belongs to a step as long as one is under way.
    """

    def __init__(
        self, name: str, config: DecoderConfig, weights: Weights, target: Target, layers: Layers,
        shapes: Sequence[BatchShape], num_pages: int, page_size: int, dtype: str, growths: Sequence[Growth] = BEAMS,
        device: Device | None = None,
    ):  # fmt: skip
        self.name, self.page_size, self.shapes = name, page_size, list(shapes)
        self._target, self._layers = target, layers
        self._growths = {g.width: g for g in growths}
        self._config = config
        model = layers.drafter(config, weights, dtype)
        self.conditioned = model.conditioned
        self._graph, self._treedef, leaves = split(model)
        pool = Pool.zeros(config, num_pages, page_size, dtype)
        #: Whether it runs elsewhere than the target.
        self.apart = device is not None and device not in target.features.devices()
        self._device = device if self.apart else None
        self._leaves, self.pool, self.drawn, self._rows = leaves, pool, Drawn.none(), jnp.zeros((0, 0))
        if self.apart:
            rows = jnp.zeros((self.most_tokens, target.features.shape[-1]), target.features.dtype)
            self._leaves, self.pool, self.drawn, self._rows = jax.device_put(
                (leaves, pool, self.drawn, rows), self._device
            )
        self._blanks = Blanks(self.shapes)
        self._rounds: dict[tuple[BatchShape, int], Any] = {}

    def overwritten(self, pages: Sequence[int]) -> None:
        """Nothing is remembered of pages here; see `jaxspec.step.swap.Owner`."""

    @property
    def widths(self) -> list[int]:
        """Of the trees it can grow, ascending."""
        return sorted(self._growths)

    @property
    def most_tokens(self) -> int:
        """Known tokens that a round takes in."""
        return self.shapes[-1].tokens

    def jobs(self) -> list[tuple[str, Callable[[], None]]]:
        """What has to be compiled before `launch`, as (name, job)."""

        def compile(shape: BatchShape, width: int) -> None:
            fn = make_round(self._graph, self._treedef, shape, self._layers, self._growths[width], DEPTH)
            buffer, levels = jax.ShapeDtypeStruct((shape.size,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
            with jax.default_matmul_precision("float32"):
                lowered = jax.jit(fn, donate_argnums=(1, 2)).lower(
                    self._leaves, self.pool, self._shared.drawn, self._features(shape, ()), buffer, levels
                )
            self._rounds[shape, width] = lowered.compile()

        jobs = [(f"{self.name} {s.trees}×{s.tokens}", partial(compile, s, w)) for s in self.shapes for w in self.widths]
        return [*jobs, (f"{self.name} features", self._compile_fetch)] if self.apart and self.conditioned else jobs

    def _compile_fetch(self) -> None:
        def fetch(features: jax.Array, slots: jax.Array) -> jax.Array:
            return features.reshape(-1, features.shape[-1]).at[slots].get(mode="fill", fill_value=0)

        slots = jax.ShapeDtypeStruct((self.most_tokens,), jnp.int32)
        self._fetch = jax.jit(fetch).lower(self._target.features, slots).compile()

    def stage(self, slots: np.ndarray) -> None:
        """Bring over the features at these slots of the target's pool (page * page size + offset; negative: zeros)."""
        padded = np.full(self.most_tokens, self._target.features.shape[0] * self.page_size, np.int32)
        padded[: len(slots)] = np.where(slots < 0, padded[0], slots)
        self._rows = jax.device_put(self._fetch(self._target.features, padded), self._device)

    def _features(self, shape: BatchShape, staged: Sequence[range]) -> jax.Array | Staged:
        if not self.apart:
            return self._target.features
        origin = np.full(shape.tokens, self.most_tokens, np.int32)
        found = np.asarray([row for rows in staged for row in rows], np.int32)
        origin[: len(found)] = found
        return Staged(self._rows, origin)

    @property
    def _shared(self) -> DraftRunner | Target:
        """Whose `drawn` rounds write."""
        return self if self.apart else self._target

    def warm_up(self) -> None:
        """Run every program once on padding."""
        for shape, width in self._rounds:
            self._run_empty(shape, width, 2)

    def profile(self, keep: bool = True) -> Callable[[int, int, int, int], float]:
        """Seconds of a round by (requests, tokens to catch up with, levels, width): measured now, or with `keep` at an
        earlier start."""
        names = {(s, w, n): f"{s.trees}×{s.tokens} width {w} levels {n}" for s, w in self._rounds for n in (1, 3)}

        def measure() -> Profile:
            return {name: median_seconds(partial(self._run_empty, *program)) for program, name in names.items()}

        sizes = [leaf.shape for leaf in self._leaves]
        key = ("round", self._config, sizes, self.shapes, type(self._layers).__name__, self.pool.keys.dtype)
        listed = list(names.values())
        found = remembered(key, listed, measure) if keep else measure()

        def lookup(requests: int, tokens: int, levels: int, width: int) -> float:
            shape = next((s for s in self.shapes if s.trees >= requests and s.tokens >= tokens), self.shapes[-1])
            first, third = (found[names[shape, width, n]] for n in (1, 3))
            return first + max(third - first, 0.0) / 2 * (levels - 1)

        return lookup

    def _run_empty(self, shape: BatchShape, width: int, levels: int) -> None:
        packed = pack([], [shape], self._blanks, self.page_size)
        jax.block_until_ready(self._run(packed.buffer, shape, width, levels))

    def _run(
        self, buffer: np.ndarray, shape: BatchShape, width: int, levels: int, staged: Sequence[range] = ()
    ) -> jax.Array:
        shared = self._shared
        self.pool, shared.drawn, out = self._rounds[shape, width](
            self._leaves, self.pool, shared.drawn, self._features(shape, staged), buffer, np.int32(levels)
        )
        return out

    def start(
        self, chains: Sequence[Tree], levels: int, width: int, staged: Sequence[range] = ()
    ) -> Callable[[], list[Candidates]]:
        """Catch up along `chains` (known tokens from each request's watermark on), then grow trees from their ends.
        Where the runner is apart and `conditioned`, `staged` are the rows that hold the features for each chain.

        -> what waits for the candidates of each, `levels * width` nodes in order of their levels, none at all if
        `levels` is 0.
        """
        width = next(w for w in self.widths if w >= min(width, self.widths[-1]))
        packed = pack(chains, self.shapes, self._blanks, self.page_size)
        out = self._run(packed.buffer, packed.shape, width, levels, staged)
        return lambda: self._read(out, len(chains), levels, width)

    def _read(self, out: jax.Array, count: int, levels: int, width: int) -> list[Candidates]:
        if levels == 0:
            return [Candidates(*_NOTHING)] * count
        token, parent, bits = np.asarray(out)[:, :count, :levels]  # [R, levels, W] each
        out_parent = parent
        parent = parent + (np.arange(levels, dtype=np.int32) * width - width)[:, None]
        parent[:, 0] = -1
        logprob = bits.view(np.float32)
        drawn: list[np.ndarray | None] = [None] * count
        if self._growths[width].draws:
            # Rows of `drawn`: that of a node is its parent's place in the round's request and the node's level.
            above = out_parent + width * (np.arange(levels)[:, None] + DEPTH * np.arange(count)[:, None, None])
            drawn = list(above.astype(np.int32))
        return [
            Candidates(token[i].ravel(), parent[i].ravel(), logprob[i].ravel(), None if d is None else d.ravel())
            for i, d in enumerate(drawn)
        ]


_NOTHING = np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
