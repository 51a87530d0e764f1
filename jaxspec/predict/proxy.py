"""The proxy predictor (SSJF, §3.1): a small encoder and a head that predict the answer's length from the prompt."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from jaxspec.compilation import compile_ahead
from jaxspec.models.bert import BertEncoder, mean_pool
from jaxspec.models.length_head import LengthHead, LengthModel
from jaxspec.predict import predictor_file as file
from jaxspec.predict.formulation import Formulation
from jaxspec.predict.predictor import MOST, clip

#: Row widths of the compiled programs, in tokens: a text is padded to the smallest that fits.
LENGTHS = (32, 64, 128, 256, MOST)
#: Numbers of rows of the compiled programs, descending; a program has at most `_TOKENS` tokens, or one row. Texts are
#: split so that no row stays empty: on a CPU a padding row costs as much as any other.
BATCHES = (16, 4, 1)
_TOKENS = 2048

Job = Literal["predict", "read"]


class ProxyPredictor:
    """Predicts in batches of a few fixed shapes. Not thread-safe, but not bound to a thread."""

    def __init__(
        self,
        encoder: BertEncoder,
        head: LengthHead,
        formulation: Formulation,
        tokenizer: Tokenizer,
        name: str,
        about: Mapping[str, str] | None = None,
        longest: int = MOST,
        digest: str = "",
    ):
        """`name`: for logs and metrics. `about`: further metadata for the file (target model, metrics, licence).
        `longest`: maximum tokens read of a text, the last ones. `digest`: of the file it was loaded from."""
        self.formulation, self.tokenizer = formulation, tokenizer
        self.name, self.about, self.digest = name, dict(about or {}), digest
        self.config = encoder.config
        self._model = LengthModel(encoder, head)
        self._graph, state = nnx.split(self._model)
        self._leaves, self._treedef = jax.tree.flatten(state)
        most = min(MOST, self.config.max_positions, longest)
        self._lengths = (*(n for n in LENGTHS if n < most), most)
        self._programs: dict[tuple[Job, int, int], jax.stages.Compiled] = {}

    @classmethod
    def load(cls, path: str | Path) -> ProxyPredictor:
        """Load a file from `save`. Raises `ModelLoadError` with the reason if it is damaged or something else."""
        p = file.read(Path(path))
        return cls(p.model.encoder, p.model.head, p.formulation, p.tokenizer, p.name, p.about, p.longest, p.digest)

    def save(self, path: str | Path) -> None:
        """Write the predictor atomically as one safetensors file. The encoder's matrices are rounded to INT8."""
        longest = self._lengths[-1]
        parts = self._model, self.formulation, self.tokenizer, self.name, self.about, longest
        file.write(file.PredictorFile(*parts), Path(path))

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        """Predicted output tokens `[n]` float64."""
        return self.formulation.lengths(self._run("predict", texts, self.formulation.outputs))

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Sentence embeddings `[n, H]` float32, unit vectors."""
        return self.read(texts)[1]

    def read(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Predicted output tokens `[n]` float64 and embeddings `[n, H]` float32, from one encoder pass."""
        outputs = self.formulation.outputs
        joined = self._run("read", texts, outputs + self.config.hidden)
        return self.formulation.lengths(joined[:, :outputs]), joined[:, outputs:]

    def programs(self, embeddings: bool = False) -> list[tuple[str, Callable[[], None]]]:
        """Compile jobs (name, job) of every shape of `predict`, or with `embeddings` of `embed` and `read`."""
        job: Job = "read" if embeddings else "predict"
        shapes = [(batch, n) for n in self._lengths for batch in BATCHES if batch * n <= max(_TOKENS, n)]
        return [(f"{self.name} {batch}×{n}", partial(self._compile, job, batch, n)) for batch, n in shapes]

    def warm_up(self, embeddings: bool = False) -> None:
        """Compile every shape of `predict`, or with `embeddings` of `embed` and `read`, which then compile nothing."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda program: program[1](), self.programs(embeddings)))
        if jax.default_backend() == "cpu":
            return
        for (_, batch, length), program in self._programs.items():  # an accelerator's first run takes longer
            jax.block_until_ready(program(self._leaves, np.zeros((batch, length), np.int32), np.ones(batch, np.int32)))

    def _compile(self, job: Job, batch: int, length: int) -> None:
        if (job, batch, length) in self._programs:
            return

        def run(leaves: list[jax.Array], ids: jax.Array, counts: jax.Array) -> jax.Array:
            model = nnx.merge(self._graph, jax.tree.unflatten(self._treedef, leaves))
            mask = jnp.arange(length) < counts[:, None]
            if job == "predict":
                return model(ids, mask)
            hidden = model.encoder(ids, mask)
            return jnp.concatenate([model.head(hidden[:, 0]), mean_pool(hidden, mask)], 1)

        ids, counts = jax.ShapeDtypeStruct((batch, length), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
        self._programs[job, batch, length] = compile_ahead(run, self._leaves, ids, counts)

    def _run(self, job: Job, texts: Sequence[str], width: int) -> np.ndarray:
        """`[n, width]` float32, in the order of `texts`."""
        rows = [clip(self.tokenizer, text, self._lengths[-1]) for text in texts]
        out = np.empty((len(rows), width), np.float32)
        for indices, length in self._batches([len(row) for row in rows]):
            ids = np.zeros((len(indices), length), np.int32)
            for k, i in enumerate(indices):
                ids[k, : len(rows[i])] = rows[i]
            counts = np.asarray([len(rows[i]) for i in indices], np.int32)
            self._compile(job, len(indices), length)
            out[indices] = self._programs[job, len(indices), length](self._leaves, ids, counts)
        return out

    def _batches(self, sizes: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """Row indices and width of each batch: every row once, in shapes that `warm_up` compiles."""

        def length_of(i: int) -> int:
            return next(n for n in self._lengths if sizes[i] <= n)

        for length, group in groupby(sorted(range(len(sizes)), key=length_of), length_of):
            rest = list(group)
            while rest:
                take = next(b for b in BATCHES if b == 1 or (b <= len(rest) and b * length <= _TOKENS))
                yield rest[:take], length
                rest = rest[take:]
