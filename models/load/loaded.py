"""A loaded model and its converted copy in the cache folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxspec.models.config import DecoderConfig, RopeScaling
from jaxspec.models.load.files import replacing
from jaxspec.models.load.tokenizer import Tokenizer
from jaxspec.models.load.weights import LazyWeights, Weights

#: Version of the file layout. Increase it when weights or metadata change: older files are then converted again.
_LAYOUT = "1"


@dataclass(frozen=True)
class LoadedModel:
    """Configuration, weights and tokenizer of a model.

    `weights` as in `jaxspec.models.load`: of `load_model` a `LazyWeights`, but any mapping will do, also one of arrays
    on the device.
    """

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
        save_file({name: np.ascontiguousarray(w) for name, w in model.weights.items()}, file, metadata)


def load_converted(path: Path, origin: str, name: str) -> LoadedModel | None:
    """Load a file of `save_converted`, which stays memory-mapped for its weights.

    Returns None if it is missing, damaged or has another origin.
    """
    try:
        file: Any = safe_open(path, framework="numpy")
    except (OSError, SafetensorError):
        return None
    metadata = file.metadata() or {}
    if (metadata.get("layout"), metadata.get("origin")) != (_LAYOUT, origin):
        return None
    config = json.loads(metadata["config"])
    scaling = config.pop("rope_scaling")
    for key in ("windowed_layers", "eos_token_ids"):
        config[key] = tuple(config[key])
    return LoadedModel(
        config=DecoderConfig(**config, rope_scaling=scaling and RopeScaling(**scaling)),
        weights=LazyWeights({name: partial(file.get_tensor, name) for name in file.keys()}),  # noqa: SIM118
        tokenizer=Tokenizer.from_json(metadata["tokenizer"]),
        name=name,
    )
