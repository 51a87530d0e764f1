"""Settings of one training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from jaxspec.config import load_settings


class DistillConfig(BaseModel):
    """A preset of `configs/distill`; unknown keys are refused. Paths are relative to the current folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    #: Built-in name, Hugging Face directory, .gguf file or hub id.
    target: str = "smollm2-135m"
    #: Files that `jaxspec.draft.distill.generate` wrote.
    data: list[str] = Field(min_length=1)
    #: Where features and checkpoints are kept while training.
    work: str = "distill"
    #: The trained drafter; `--draft` knows such files by their ending.
    out: str = Field(pattern=r"\.safetensors$")
    #: Layers, and whether the target's features are read (EAGLE) or tokens only.
    layers: PositiveInt = 1
    conditioned: bool = True
    #: What the drafter's layers begin as: the target's first or last ones, or those of a drafter trained before
    #: (layers that it lacks are added so that they change nothing at first).
    begin: str = Field("last", pattern=r"^(first|last|.+\.safetensors)$")
    #: Most frequent tokens that the drafter can propose.
    vocabulary: PositiveInt = 8192
    #: Tokens of a training row, prompt and answer.
    longest: PositiveInt = 384
    #: Whether the prompts' tokens are trained on too: more text, if of another hand.
    prompts: bool = False
    #: Rows a step.
    batch: PositiveInt = 8
    steps: PositiveInt = 2000
    learning_rate: PositiveFloat = 5e-4
    warmup: PositiveInt = 50
    #: Passes over a row: from the second on, features are the drafter's own of the pass before.
    passes: PositiveInt = 2
    #: Weight of the error of the features beside that of the distributions.
    regression: float = Field(0.5, ge=0)
    #: Steps between evaluations and checkpoints.
    every: PositiveInt = 100
    seed: int = 0

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> DistillConfig:
        """Raises `ConfigError` naming every bad key or value."""
        return load_settings(cls, path, overrides)
