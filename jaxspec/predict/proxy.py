"""The proxy predictor (SSJF, §3.1): a small encoder and a head that read the length of the answer off the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from jaxspec.models.bert import BertEncoder
from jaxspec.models.length_head import LengthHead
from jaxspec.predict.formulation import Formulation


class ProxyPredictor:
    """Answers in batches of a few fixed shapes. To be called from one thread at a time, whichever."""

    def __init__(
        self,
        encoder: BertEncoder,
        head: LengthHead,
        formulation: Formulation,
        tokenizer: Tokenizer,
        name: str,
        about: Mapping[str, str] | None = None,
    ):
        """`name`: for people and metrics. `about`: what else the file should tell (target model, figures, licence)."""
        self.encoder, self.head, self.formulation, self.tokenizer = encoder, head, formulation, tokenizer
        self.name, self.about = name, dict(about or {})

    @classmethod
    def load(cls, path: str | Path) -> ProxyPredictor:
        """What `save` wrote. Raises `ModelLoadError` with the reason if the file is damaged or something else."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write the predictor as one safetensors file, at once or not at all."""
        raise NotImplementedError

    def warm_up(self, embeddings: bool = False) -> None:
        """Compile every shape of `predict`, and of `embed` if it will be called: afterwards nothing compiles."""
        raise NotImplementedError

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        """Output tokens `[n]` float64, of prompts."""
        raise NotImplementedError

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Sentence embeddings `[n, H]` float32, of length 1."""
        raise NotImplementedError
