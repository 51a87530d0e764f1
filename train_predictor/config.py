"""Settings of a length predictor's training run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from jaxspec.config import load_settings
from jaxspec.train_predictor.names import defaults

#: SSJF's Table 2 and §3.1, and survival analysis; `jaxspec.predict.formulation` has one class for each.
FormulationName = Literal["reg_l1", "reg_mse", "cls", "ord_mse", "ord_l1", "binary", "pairwise", "survival"]


class PredictorConfig(BaseModel):
    """A preset of `configs/predictor`. Unknown keys are refused. Paths are relative to the current folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    #: The model that gave the answers. Its tokenizer decodes rows of token ids.
    target: str = "smollm2-135m"
    #: Files written by `train_predictor.collect`, or other prompts with lengths. Default: trained/NAME/answers.jsonl,
    #: with the target's name.
    data: list[str] = Field(min_length=1)
    #: Token limit at which answers were cut, for rows that do not say whether theirs was.
    cap: PositiveInt | None = None
    #: Use only the first `limit` rows, in file order; all if unset.
    limit: PositiveInt | None = None
    #: Shares of the conversations held out for early stopping (validation) and for the final report (test).
    validation: float = Field(0.1, gt=0, lt=0.5)
    test: float = Field(0.1, gt=0, lt=0.5)

    #: "all-minilm-l6-v2", or a local BERT folder.
    encoder: str = "all-minilm-l6-v2"
    #: Number of encoder layers to keep, from the first; all if unset.
    layers: PositiveInt | None = None
    #: Maximum tokens read of a prompt; the last ones are kept.
    longest: PositiveInt = Field(512, ge=8)
    formulation: FormulationName = "reg_l1"
    #: Whether regressions fit log(length + 1) or the length.
    scale: Literal["log", "linear"] = "log"
    #: Weight of the pairwise ranking loss that `survival` adds to its own.
    ranking: float = Field(0.0, ge=0)
    #: Number of percentile classes, for classification and in the report.
    classes: int = Field(5, ge=2, le=100)
    #: Width of the head's hidden layer.
    width: PositiveInt = 128

    #: Rows per step.
    batch: int = Field(32, ge=2)
    #: First phase: encoder and head.
    steps: PositiveInt = 1000
    learning_rate: PositiveFloat = 5e-5
    warmup: PositiveInt = 50
    #: Do not train the encoder's embeddings: they are half of MiniLM's weights, and most tokens are rare.
    freeze_embeddings: bool = False
    #: Second phase: the head only.
    head_steps: int = Field(1000, ge=0)
    head_learning_rate: PositiveFloat = 1e-3
    weight_decay: float = Field(0.01, ge=0)
    #: Dropout on the CLS vector.
    dropout: float = Field(0.1, ge=0, lt=1)
    #: Steps between evaluations; each also writes a checkpoint.
    every: PositiveInt = 50
    #: A phase ends after this many evaluations without a lower validation loss.
    patience: PositiveInt = 4
    seed: int = 0

    #: Folder of checkpoints and learning curves. Default: trained/NAME.
    work: str
    #: File of the trained predictor. Default: trained/NAME/NAME-PRESET.safetensors, with the name of the YAML file.
    out: str = Field(pattern=r"\.safetensors$")

    @model_validator(mode="after")
    def _enough_to_train_on(self) -> PredictorConfig:
        if self.validation + self.test >= 0.8:
            raise ValueError("validation and test together leave too little to train on")
        return self

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> PredictorConfig:
        """Read a YAML file and apply `overrides`. Raises `ConfigError` naming every bad key or value."""
        return load_settings(cls, path, overrides, partial(defaults, path, cls.model_fields["target"].default))
