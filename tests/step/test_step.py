"""The packed step on random forests over committed KV, against one plain forward pass a node."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import forests, tiny
from jaxspec.kernels import cpu
from jaxspec.step.addresses import Executable, ProgramSpec
from jaxspec.step.batch import BatchBuffers, BatchShape
from jaxspec.step.gpu import GpuLayers
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import Packed, SamplingInputs, Tree, pack
from jaxspec.step.penalties import PenaltyTable
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.step import MOVING, make_step, split
from jaxspec.step.xla import XlaLayers

PAGE, PAGES = 16, 48
SHAPES = (BatchShape(16, 16, 4, 12), BatchShape(128, 64, 4, 12))
BUFFERS = BatchBuffers(SHAPES)
LAYERS = {"xla": XlaLayers(), "native": NativeLayers(), "gpu": GpuLayers(interpret=jax.default_backend() != "gpu")}


class Machine:
    """A model, a pool and compiled steps, run by hand."""

    def __init__(self, kind: str, window: int | None):
        loaded, layers = tiny.model(window), LAYERS[kind]
        if kind == "native":
            cpu.load()
        self.config = loaded.config
        graph, treedef, self.leaves = split(layers.decoder(loaded.config, loaded.weights, "float32"))
        self.table = PenaltyTable.empty(1, loaded.config.vocab_size)
        self.fresh()
        self.steps: dict[BatchShape, Executable] = {}
        for s in SHAPES:
            arguments = self.leaves, self.kv_cache, self.table, DraftDistributions.empty(), jnp.zeros(s.size, jnp.int32)
            step = make_step(graph, treedef, s, layers)
            spec = ProgramSpec.of(layers, step, arguments, 2, donate=[1], moving=MOVING)
            self.steps[s] = Executable(layers, spec, unread=0)

    def fresh(self) -> None:
        """Garbage in the pool: nothing may depend on what was not written."""
        self.kv_cache = jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan), KVCache.zeros(self.config, PAGES, PAGE, "float32")
        )

    def run(self, trees: list[Tree]) -> tuple[Packed, np.ndarray, np.ndarray]:
        packed = pack(trees, SHAPES, BUFFERS, PAGE)
        self.kv_cache, result = self.steps[packed.shape](
            self.leaves, self.kv_cache, self.table, DraftDistributions.empty(), packed.buffer
        )
        decision = np.asarray(result.decision)
        chex.assert_shape(decision, (packed.shape.rows + packed.shape.tokens,))
        return packed, decision[: packed.shape.rows], decision[packed.shape.rows :].astype(bool)


@lru_cache
def machine(kind: str, window: int | None) -> Machine:
    return Machine(kind, window)


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        ("native", None),
        ("xla", 11),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in (("xla", None), ("native", 11))),
        *(pytest.param("gpu", window, marks=[pytest.mark.slow, pytest.mark.gpu]) for window in (None, 11)),
    ],
)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_forest_over_committed_kv(kind: str, window: int | None, data: Any) -> None:
    """Prefill in chunks, verify trees, decode on: every choice and acceptance is the plain forward pass's."""
    m = machine(kind, window)
    m.fresh()
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    rows = list(rng.permutation(PAGES))
    shared = [rows.pop() for _ in range(2)]
    start = list(rng.integers(256, size=2 * PAGE))
    share = data.draw(st.booleans())
    texts: list[list[int]] = []
    pages: list[np.ndarray] = []
    for n in lengths:
        own = [int(t) for t in rng.integers(256, size=n)]
        need = -(-(n + 20 + len(start)) // PAGE)
        texts.append([int(t) for t in start] + own if share else own)
        pages.append(
            np.asarray(
                [*shared, *(rows.pop() for _ in range(need))] if share else [rows.pop() for _ in range(need)], np.int32
            )
        )

    done = [0] * len(texts)
    if share:  # the shared pages are computed once, by the first
        m.run([Tree.chain(texts[0][: 2 * PAGE], 0, pages[0], SamplingInputs())])
        done = [2 * PAGE] * len(texts)
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        chunks = [int(rng.integers(1, 40)) for _ in texts]
        work = [
            (i, Tree.chain(t[done[i] : done[i] + c], done[i], pages[i], SamplingInputs()))
            for i, (t, c) in enumerate(zip(texts, chunks, strict=True))
            if done[i] < len(t)
        ]
        packed, sampled, _ = m.run([tree for _, tree in work])
        for (i, tree), c in zip(work, packed.rows, strict=True):
            done[i] += len(tree.token)
            assert sampled[c] == tiny.logits(texts[i][: done[i]], window)[-1].argmax()

    for _ in range(2):
        trees, parent_lists = [], []
        for text, own in zip(texts, pages, strict=True):
            parents = forests.random_parents(rng, int(rng.integers(1, 8)))

            def choose(path: list[int], text: list[int] = text) -> int:
                return int(tiny.logits(text + path, window)[-1].argmax())

            root = choose([])
            tokens = forests.draft_tokens(rng, parents, root, 256, choose)
            size = len(parents)
            known = np.asarray([1] + [0] * (size - 1), np.int32)
            trees.append(
                Tree(
                    np.asarray(tokens, np.int32),
                    forests.depths(parents),
                    forests.subtree_sizes(parents),
                    known,
                    len(text),
                    own,
                    np.arange(size, dtype=np.int32),
                )
            )
            parent_lists.append(parents)
            np.testing.assert_array_equal(trees[-1].parents(), parents)
        packed, sampled, accepted = m.run(trees)
        assert packed.committed.sum() <= LAYERS[kind].positions_read(packed.committed, PAGE)
        for i, (tree, parents) in enumerate(zip(trees, parent_lists, strict=True)):
            node, first = packed.nodes[i], packed.rows[i]
            best: list[int] = []
            for k in range(len(parents)):
                path = forests.path_to(parents, k)
                words = [int(tree.token[p]) for p in path]
                right = int(tiny.logits(texts[i] + words, window)[-1].argmax())
                assert sampled[first + k] == right
                fits = all(tree.token[b] == sampled[first + a] for a, b in pairwise(path))
                assert accepted[node + k] == fits
                if fits and len(words) > len(best):
                    best = words
            texts[i] = texts[i] + best  # committed by the step, so the next round reads it
    whole = np.concatenate([own[: len(text) // PAGE] for text, own in zip(texts, pages, strict=True)])
    chex.assert_tree_all_finite((np.asarray(m.kv_cache.keys)[:, whole], np.asarray(m.kv_cache.values)[:, whole]))


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 1]])
def test_drafts_know_their_parents_row(rows: list[int]) -> None:
    """Whether all nodes have logits or only parents. A request of one token comes before."""

    def ints(*numbers: int) -> np.ndarray:
        return np.asarray(numbers, np.int32)

    before = Tree.chain([5], 3, ints(0), SamplingInputs())
    tree = Tree(
        ints(7, 8, 9, 6), ints(0, 1, 2, 1), ints(4, 2, 1, 1), ints(1, 0, 0, 0), 17, ints(1, 2), ints(*rows),
        parent=ints(-1, 0, 1, 0),
    )  # fmt: skip
    packed = pack([before, tree], SHAPES, BUFFERS, PAGE)
    offset, _, _ = packed.shape.layout["parent_row"]
    assert packed.buffer[offset : offset + 5].tolist() == [0, 0, 1, 2, 1]


def test_too_large_a_step_is_refused() -> None:
    trees = [Tree.chain(range(200), 0, np.arange(30, dtype=np.int32), SamplingInputs())]
    with pytest.raises(ValueError, match="200 tokens"):
        pack(trees, SHAPES, BUFFERS, PAGE)
