"""Settings of a drafter's training run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from jaxspec.config import load_settings
from jaxspec.train_predictor.names import defaults


class DistillConfig(BaseModel):
    """A preset of `configs/distill`. Unknown keys are refused. Paths are relative to the current folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    #: The target model: built-in name, Hugging Face directory, .gguf file or hub id.
    target: str = "smollm2-135m"
    #: Files written by `jaxspec.train_predictor.collect`. Default: trained/NAME/answers.jsonl, with the target's name.
    data: list[str] = Field(min_length=1)
    #: Folder of features and checkpoints. Default: trained/NAME.
    work: str
    #: File of the trained drafter; `--draft` recognises it by its suffix. Default: with the name of the YAML file,
    #: trained/NAME/NAME-PRESET.safetensors.
    out: str = Field(pattern=r"\.safetensors$")
    #: Number of layers.
    layers: PositiveInt = 1
    #: Whether the drafter reads the target's features (as EAGLE-3 does), or tokens only.
    conditioned: bool = True
    #: Whether all depths are drafted at once (as P-EAGLE does), instead of one after the other. To be compared: the
    #: engine does not draft so, and no file of such a drafter is written.
    parallel: bool = False
    #: Initial layers: the target's first or last ones, or those of a trained drafter. Layers that the latter lacks are
    #: added with zero output, so they change nothing at first.
    begin: str = Field("last", pattern=r"^(first|last|.+\.safetensors)$")
    #: Size of the draft vocabulary, the answers' most frequent tokens. auto: a sixth of the target's, at least 8,192.
    vocabulary: PositiveInt | Literal["auto"] = "auto"
    #: Maximum tokens of a training row, prompt and answer together; at most those that the target has positions for.
    longest: PositiveInt = 384
    #: Whether to train on the prompts' tokens too: more text, but not the target's own.
    prompts: bool = False
    #: Rows per step.
    batch: PositiveInt = 8
    steps: PositiveInt = 2000
    learning_rate: PositiveFloat = 5e-4
    warmup: PositiveInt = 50
    #: Passes over each row, each for drafts one level deeper. From the second on, a position reads the drafter's own
    #: output of the pass before.
    passes: PositiveInt = 4
    #: Weight of each pass's loss, relative to the pass before.
    discount: float = Field(0.8, gt=0, le=1)
    #: Steps between evaluations; each also writes a checkpoint.
    every: PositiveInt = 100
    seed: int = 0

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> DistillConfig:
        """Read a YAML file and apply `overrides`. Raises `ConfigError` naming every bad key or value."""
        return load_settings(cls, path, overrides, partial(defaults, path, cls.model_fields["target"].default))
