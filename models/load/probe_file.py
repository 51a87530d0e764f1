"""Files of length probes: float16 weights, with the target's name and sizes."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.drafter import feature_width
from jaxspec.models.length_probe import ENDS, LengthProbe
from jaxspec.models.load.files import blaming, read_tensors, replacing

_FORMAT = "jaxspec-length-probe-1"


def save_probe(probe: LengthProbe, target: str, path: Path) -> None:
    """Write the probe's weights for the target of this name."""
    weights = {name: np.asarray(value, np.float16) for name, value in _leaves(probe).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        save_file(weights, new, {"format": _FORMAT, "target": target, "ends": json.dumps(ENDS.tolist())})


def load_probe(path: Path, target: DecoderConfig) -> LengthProbe:
    """Load a probe for the target. Raises `ModelLoadError` if the file is not a probe or does not fit its sizes."""
    with blaming(f"length probe {path}", "it is damaged"):
        return _load(path, target)


def _load(path: Path, target: DecoderConfig) -> LengthProbe:
    metadata, stored = read_tensors(path, "length probe")
    if metadata.get("format") != _FORMAT or json.loads(metadata.get("ends", "[]")) != ENDS.tolist():
        raise ModelLoadError(f"{path} is not a length probe trained by this version of jaxspec.train_predictor.probe")
    inner = stored.get("inner.kernel")
    inputs = feature_width(target)
    if inner is None or inner.ndim != 2 or inner.shape[0] != inputs:
        raise ModelLoadError(
            f"length probe {path} is for {metadata.get('target', ''):.100}, not for features of {inputs}"
        )
    probe = LengthProbe(inputs, inner.shape[1], nnx.Rngs(0))
    for name, value in _leaves(probe).items():
        if name not in stored or stored[name].shape != value.shape:
            raise ModelLoadError(f"length probe {path}: {name} does not have the shape {value.shape}")
    for part in ("inner", "outer"):
        linear = getattr(probe, part)
        linear.kernel[...] = jnp.asarray(stored[f"{part}.kernel"], jnp.float32)
        linear.bias[...] = jnp.asarray(stored[f"{part}.bias"], jnp.float32)
    return probe


def _leaves(probe: LengthProbe) -> dict[str, np.ndarray]:
    return {
        f"{part}.{name}": np.asarray(getattr(getattr(probe, part), name)[...])
        for part in ("inner", "outer") for name in ("kernel", "bias")
    }  # fmt: skip
