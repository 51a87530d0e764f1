"""The proxy predictor (SSJF, §3.1): a small encoder and a head that predict the answer's length from the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from jaxspec.models.bert import BertEncoder
from jaxspec.models.length_head import LengthHead, LengthModel
from jaxspec.predict import packed_encoder
from jaxspec.predict import predictor_file as file
from jaxspec.predict.formulation import Formulation
from jaxspec.predict.predictor import MOST
from jaxspec.predict.text_model import TextModel


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
    ):
        """`name`: for logs and metrics. `about`: further metadata for the file (target model, metrics, licence).
        `longest`: maximum tokens read of a text, the last ones."""
        self.formulation, self.tokenizer = formulation, tokenizer
        self.name, self.about = name, dict(about or {})
        self.config = encoder.config
        self._model, self._packed = LengthModel(encoder, head), False
        most = min(MOST, self.config.max_positions, longest)
        self._run = TextModel(self._model, formulation.outputs, tokenizer, name, most)

    @classmethod
    def load(cls, path: str | Path, kernels: bool = False) -> ProxyPredictor:
        """Load a file from `save`. Raises `ModelLoadError` with the reason if it is damaged or something else.

        `kernels`: run on the CPU kernels where they are available, with INT8 matrices. It cannot be saved then.
        """
        p = file.read(Path(path))
        if packed := kernels and packed_encoder.available():
            packed_encoder.use_packed(p.model.encoder, p.matrices)
        loaded = cls(p.model.encoder, p.model.head, p.formulation, p.tokenizer, p.name, p.about, p.longest)
        loaded._packed = packed
        return loaded

    def save(self, path: str | Path) -> None:
        """Write the predictor atomically as one safetensors file. The encoder's matrices are rounded to INT8.

        Raises `ValueError` if it was loaded for the CPU kernels.
        """
        if self._packed:
            raise ValueError("a predictor that was loaded for the CPU kernels cannot be saved")
        longest = self._run.lengths[-1]
        parts = self._model, self.formulation, self.tokenizer, self.name, self.about, longest
        file.write(file.PredictorFile(*parts), Path(path))

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        """Predicted output tokens `[n]` float64."""
        return self.formulation.lengths(self._run(texts))

    def programs(self) -> list[tuple[str, Callable[[], None]]]:
        """Compile jobs (name, job) of every shape of `predict`."""
        return self._run.programs()

    def warm_up(self) -> None:
        """Compile every shape of `predict`, which then compiles nothing."""
        self._run.warm_up()
