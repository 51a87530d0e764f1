"""Runs a model on texts, in batches of a few fixed shapes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from jaxspec.compilation import compile_ahead
from jaxspec.predict.predictor import MOST, clip

#: Row widths of the compiled programs, in tokens: a text is padded to the smallest that fits.
LENGTHS = (32, 64, 128, 256, MOST)
#: Numbers of rows of the compiled programs, descending; a program has at most `_TOKENS` tokens, or one row. Texts are
#: split so that no row stays empty: on a CPU a padding row costs as much as any other.
BATCHES = (4, 1)
_TOKENS = 2048


class TextModel:
    """`model` maps ids `[B, T]` int32 and a mask `[B, T]` bool, True for tokens, to `[B, width]` float32.

    `longest`: maximum tokens read of a text, the last ones. Not thread-safe, but not bound to a thread.
    """

    def __init__(self, model: Callable[..., jax.Array], width: int, tokenizer: Tokenizer, name: str, longest: int):
        """`model` is an `nnx.Module`; `name` is for logs."""
        self._graph, state = nnx.split(model)
        self._leaves, self._treedef = jax.tree.flatten(state)
        self._width, self._tokenizer, self._name = width, tokenizer, name
        #: Row widths of its programs; the last is the most that it reads.
        self.lengths = (*(n for n in LENGTHS if n < longest), longest)
        self._programs: dict[tuple[int, int], jax.stages.Compiled] = {}

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """`[n, width]` float32, in the order of `texts`."""
        rows = [clip(self._tokenizer, text, self.lengths[-1]) for text in texts]
        out = np.empty((len(rows), self._width), np.float32)
        for indices, length in self._batches([len(row) for row in rows]):
            ids = np.zeros((len(indices), length), np.int32)
            for k, i in enumerate(indices):
                ids[k, : len(rows[i])] = rows[i]
            counts = np.asarray([len(rows[i]) for i in indices], np.int32)
            self._compile(len(indices), length)
            out[indices] = self._programs[len(indices), length](self._leaves, ids, counts)
        return out

    def programs(self) -> list[tuple[str, Callable[[], None]]]:
        """Compile jobs (name, job) of every shape."""
        shapes = [(batch, n) for n in self.lengths for batch in BATCHES if batch * n <= max(_TOKENS, n)]
        return [(f"{self._name} {batch}×{n}", partial(self._compile, batch, n)) for batch, n in shapes]

    def warm_up(self) -> None:
        """Compile every shape; calls then compile nothing."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda program: program[1](), self.programs()))
        if jax.default_backend() == "cpu":
            return
        for (batch, length), program in self._programs.items():  # an accelerator's first run takes longer
            jax.block_until_ready(program(self._leaves, np.zeros((batch, length), np.int32), np.ones(batch, np.int32)))

    def _compile(self, batch: int, length: int) -> None:
        if (batch, length) in self._programs:
            return

        def run(leaves: list[jax.Array], ids: jax.Array, counts: jax.Array) -> jax.Array:
            model = nnx.merge(self._graph, jax.tree.unflatten(self._treedef, leaves))
            return model(ids, jnp.arange(length) < counts[:, None])

        ids, counts = jax.ShapeDtypeStruct((batch, length), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
        self._programs[batch, length] = compile_ahead(run, self._leaves, ids, counts)

    def _batches(self, sizes: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """Row indices and width of each batch: every row once, in shapes that `warm_up` compiles."""

        def length_of(i: int) -> int:
            return next(n for n in self.lengths if sizes[i] <= n)

        for length, group in groupby(sorted(range(len(sizes)), key=length_of), length_of):
            rest = list(group)
            while rest:
                take = next(b for b in BATCHES if b == 1 or (b <= len(rest) and b * length <= _TOKENS))
                yield rest[:take], length
                rest = rest[take:]
