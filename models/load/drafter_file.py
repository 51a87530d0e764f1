"""Files of trained drafters. The embedding and the head are the target's and not stored.

Matrices are stored as INT8 with a scale per column (`NAME.scale`): a quarter of the size in float32, and accurate
enough for drafting.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.decoder import head_of
from jaxspec.models.drafter import DraftDecoder, feature_width
from jaxspec.models.load.files import blaming, quantized, read_tensors, replacing
from jaxspec.models.load.parts import layer_shapes
from jaxspec.models.load.stored import StoredMatrix
from jaxspec.models.load.weights import MAX_LAYERS, LazyWeights, Reader, Stored, Weights, readers_of, stored_of

_FORMAT = "jaxspec-draft-3"


def save_drafter(model: DraftDecoder, target: str, path: Path) -> None:
    """Write the trained weights, with the target's name and sizes, which `load_drafter` checks."""
    w: dict[str, np.ndarray] = {"norm": np.asarray(model.norm[...]), "vocab": np.asarray(model.vocab[...])}
    if model.norm_bias is not None:
        w["norm_bias"] = np.asarray(model.norm_bias[...])
    if model.mix is not None and model.fuse is not None:
        w |= {"mix": np.asarray(model.mix[...]), "fuse": np.asarray(model.fuse[...])}
    for i, block in enumerate(model.layers):
        w |= {f"layers.{i}.{name}": np.asarray(getattr(block, name)[...]) for name in layer_shapes(model.config)}
    small: dict[str, np.ndarray] = {}
    for name, value in w.items():
        small |= quantized(name, value) if value.ndim == 2 else {name: value}
    c = model.config
    metadata = {
        "format": _FORMAT,
        "target": target,
        "sizes": json.dumps({"layers": c.num_layers, "hidden": c.hidden_size, "vocabulary": c.vocab_size}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:  # readers never see a partial file
        save_file(small, new, metadata)


def load_drafter(path: Path, target: DecoderConfig, weights: Weights) -> tuple[DecoderConfig, Weights]:
    """Load a drafter for the target with `weights`. Returns its configuration and all its weights.

    Its own weights are float32, dequantised when they are used. Embedding and head are read from the target's when they
    are used: the embedding in the target's dtype, the head as float32. Raises `ModelLoadError` if the file is not a
    drafter or does not fit the target's sizes.
    """
    with blaming(f"drafter {path}", "it is damaged"):
        return _load(path, target, weights)


def _load(path: Path, target: DecoderConfig, weights: Weights) -> tuple[DecoderConfig, Weights]:
    metadata, stored = read_tensors(path, "drafter")
    if metadata.get("format") != _FORMAT:
        raise ModelLoadError(f"{path} is not a drafter trained by this version of jaxspec.draft.distill")
    unscaled = [name for name, value in stored.items() if value.dtype == np.int8 and f"{name}.scale" not in stored]
    if unscaled or not {"norm", "vocab"} <= stored.keys() or "sizes" not in metadata:
        raise ModelLoadError(f"drafter {path} is incomplete")
    sizes = json.loads(metadata["sizes"])
    if not 0 < sizes["layers"] <= MAX_LAYERS:
        raise ModelLoadError(f"drafter {path}: its number of layers must be between 1 and {MAX_LAYERS}")
    if (sizes["hidden"], sizes["vocabulary"]) != (target.hidden_size, target.vocab_size):
        raise ModelLoadError(
            f"drafter {path} is for {metadata['target']:.100} (width {sizes['hidden']!s:.20}, vocabulary "
            f"{sizes['vocabulary']!s:.20}), "
            f"the target has width {target.hidden_size} and vocabulary {target.vocab_size}"
        )
    shapes = {f"layers.{i}.{part}": s for i in range(sizes["layers"]) for part, s in layer_shapes(target).items()}
    if target.norm == "layer":
        shapes["norm_bias"] = (target.hidden_size,)
    if "mix" in stored or "fuse" in stored:
        h = target.hidden_size
        shapes |= {"mix": (feature_width(target), h), "fuse": (2 * h, h)}
    for name, shape in shapes.items():
        if name not in stored or stored[name].shape != shape:
            raise ModelLoadError(f"drafter {path}: {name} does not have the shape {shape} that fits the target")
    for name, value in stored.items():
        if (scale := stored.get(f"{name}.scale")) is not None and (value.ndim != 2 or scale.shape != value.shape[1:]):
            raise ModelLoadError(f"drafter {path}: {name}.scale does not have one number for each column")
    if stored["vocab"].ndim != 1 or not (stored["vocab"] >= 0).all() or not (stored["vocab"] < target.vocab_size).all():
        raise ModelLoadError(f"drafter {path}: vocab holds what are no tokens of the target")
    scales = {name: stored.pop(f"{name}.scale") for name in list(stored) if f"{name}.scale" in stored}

    def dequantized(name: str) -> np.ndarray:
        return stored[name].astype(np.float32) * scales[name]

    vocab = stored["vocab"].astype(np.int32)

    def head() -> np.ndarray:
        return np.asarray(head_of(target, weights)[:, vocab], np.float32)

    readers: dict[str, Reader] = readers_of(stored) | {name: partial(dequantized, name) for name in scales}
    readers |= {name: partial(weights.__getitem__, name) for name in ("embed", "positions") if name in weights}
    readers["head"] = head
    matrices: dict[str, Stored] = {name: [StoredMatrix.int8(stored[name].T, scale)] for name, scale in scales.items()}
    theirs = stored_of(weights)
    if "embed" in theirs:
        (part,) = theirs["embed" if target.tie_embeddings else "head"]
        matrices |= {"embed": theirs["embed"], "head": [part.rows(vocab)]}
    return target.alike(sizes["layers"]), LazyWeights(readers, matrices, of_target=["embed"])
