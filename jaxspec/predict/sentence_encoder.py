"""Embeddings of prompts by a pre-trained encoder, as it is (ALISE §3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx

from jaxspec.models.bert import BertEncoder, mean_pool
from jaxspec.models.load.bert import LoadedEncoder, load_bert
from jaxspec.predict.text_model import TextModel

#: Most tokens read of a text, the last ones; all-MiniLM-L6-v2 was made for 256.
_LONGEST = 256


class _Pooled(nnx.Module):
    def __init__(self, encoder: BertEncoder):
        self.encoder = encoder

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return mean_pool(self.encoder(ids, mask), mask)


class SentenceEncoder:
    """Embeds texts as sentence transformers do: mean over tokens after the last layer, normalised.

    No weight is trained, so similar texts are close. An encoder trained to predict lengths finds most texts similar.
    """

    def __init__(self, loaded: LoadedEncoder, name: str) -> None:
        self.name = name
        longest = min(_LONGEST, loaded.config.max_positions)
        self._model = TextModel(_Pooled(loaded.encoder), loaded.config.hidden, loaded.tokenizer, name, longest)

    @classmethod
    def load(cls, source: str) -> SentenceEncoder:
        """`source`: a built-in name, downloaded at first use, or a Hugging Face folder. Raises `ModelLoadError`."""
        return cls(load_bert(source), source)

    def programs(self) -> list[tuple[str, Callable[[], None]]]:
        """Compile jobs (name, job) of every shape."""
        return self._model.programs()

    def warm_up(self) -> None:
        """Compile every shape of `embed`."""
        self._model.warm_up()

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings `[n, H]` float32, unit vectors."""
        return self._model(texts)
