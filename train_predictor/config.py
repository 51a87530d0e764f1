"""Settings of one training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from jaxspec.config import load_settings

#: SSJF's Table 2 and §3.1; `jaxspec.predict.formulation` has one class for each.
FormulationName = Literal["reg_l1", "reg_mse", "cls", "ord_mse", "ord_l1", "binary", "pairwise"]


class PredictorConfig(BaseModel):
    """A preset of `configs/predictor`; unknown keys are refused. Paths are relative to the current folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    #: Files of rows, as `train_predictor.collect` and `draft.distill.generate` write them, or prompts with lengths.
    data: list[str] = Field(min_length=1)
    #: Whose answers these are: its tokenizer reads rows of token ids.
    target: str = "smollm2-135m"
    #: Tokens at which answers were cut, of files that do not say of each row whether it was.
    cap: PositiveInt | None = None
    #: Use so many rows, the first of the files' order; all if unset.
    limit: PositiveInt | None = None
    #: Shares of the conversations kept for early stopping, and for the report at the end.
    validation: float = Field(0.1, gt=0, lt=0.5)
    test: float = Field(0.1, gt=0, lt=0.5)

    #: "all-minilm-l6-v2", or a local BERT folder.
    encoder: str = "all-minilm-l6-v2"
    #: Keep the encoder's first so many layers; all if unset.
    layers: PositiveInt | None = None
    #: Tokens of a prompt that are read, the last ones.
    longest: PositiveInt = Field(512, ge=8)
    formulation: FormulationName = "reg_l1"
    #: What regressions are fitted to: the logarithm of the length, or the length.
    scale: Literal["log", "linear"] = "log"
    #: Percentile classes, of classification and of the report.
    classes: int = Field(5, ge=2, le=100)
    #: Width of the head's hidden layer.
    width: PositiveInt = 128

    #: Rows a step.
    batch: int = Field(32, ge=2)
    #: First phase: encoder and head.
    steps: PositiveInt = 1000
    learning_rate: PositiveFloat = 5e-5
    warmup: PositiveInt = 50
    #: Whether the encoder's embeddings stay as they are: half of MiniLM's weights, and most tokens are rare.
    freeze_embeddings: bool = False
    #: Second phase: the head only.
    head_steps: int = Field(1000, ge=0)
    head_learning_rate: PositiveFloat = 1e-3
    weight_decay: float = Field(0.01, ge=0)
    #: Share of the CLS vector that a training step leaves out.
    dropout: float = Field(0.1, ge=0, lt=1)
    #: Steps between evaluations and checkpoints, and evaluations without a better loss that end a phase.
    every: PositiveInt = 50
    patience: PositiveInt = 4
    seed: int = 0

    #: Where checkpoints and curves are kept.
    work: str = "predictor"
    #: The trained predictor.
    out: str = Field(pattern=r"\.safetensors$")

    @model_validator(mode="after")
    def _enough_to_train_on(self) -> PredictorConfig:
        if self.validation + self.test >= 0.8:
            raise ValueError("validation and test together leave too little to train on")
        return self

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> PredictorConfig:
        """Raises `ConfigError` naming every bad key or value."""
        return load_settings(cls, path, overrides)
