"""A loaded model and its converted copy in the cache folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxspec.models.config import DecoderConfig, RopeScaling
from jaxspec.models.load.files import replacing
from jaxspec.models.load.tokenizer import Tokenizer
from jaxspec.models.load.weights import Weights

#: Version of the file layout. Increase it when weights or metadata change: older files are then converted again.
_LAYOUT = "1"


@dataclass(frozen=True)
class LoadedModel:
    """Configuration, weights (see `jaxspec.models.load`) and tokenizer of a model."""

    config: DecoderConfig
    weights: Weights
    tokenizer: Tokenizer
    name: str


def save_converted(model: LoadedModel, path: Path, origin: str) -> None:
    """Write `model` atomically as one safetensors file. `origin` identifies the source file."""
    metadata = {
        "layout": _LAYOUT,
        "origin": origin,
        "config": json.dumps(asdict(model.config)),
        "tokenizer": model.tokenizer.to_json(),
    }
    with replacing(path) as file:
        save_file(model.weights, file, metadata)


def load_converted(path: Path, origin: str, name: str) -> LoadedModel | None:
    """Load a file of `save_converted`. Returns None if it is missing, damaged or has another origin."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if (metadata.get("layout"), metadata.get("origin")) != (_LAYOUT, origin):
                return None
            weights: dict[str, np.ndarray] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    config = json.loads(metadata["config"])
    scaling = config.pop("rope_scaling")
    for key in ("windowed_layers", "eos_token_ids"):
        config[key] = tuple(config[key])
    return LoadedModel(
        config=DecoderConfig(**config, rope_scaling=scaling and RopeScaling(**scaling)),
        weights=weights,
        tokenizer=Tokenizer.from_json(metadata["tokenizer"]),
        name=name,
    )
