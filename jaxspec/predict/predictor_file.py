"""File format of a trained predictor: a safetensors file of quantised matrices, tokenizer, model config and a digest.

Format 2 stores the token embedding, half of an encoder, in blocks of 4 bits, and the tokenizer compressed; format 1 had
INT8 and plain text.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from gguf import GGMLQuantizationType
from gguf.quants import quant_shape_from_byte_shape, quantize
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from jaxspec.errors import ModelLoadError
from jaxspec.models.bert import BertConfig, BertEncoder
from jaxspec.models.length_head import LengthHead, LengthModel
from jaxspec.models.load.files import blaming, filled, quantized, read_tensors, replacing, restored, weights_of
from jaxspec.models.load.stored import StoredMatrix
from jaxspec.models.load.weights import Weights
from jaxspec.predict.formulation import Formulation

_KIND = "jaxspec-length"
_VERSION, _FORMER = "2", "1"
_TOKENIZER = "tokenizer"
_EMBEDDING, _BLOCKS, _BLOCK = "encoder.tokens.embedding", "Q4_0", 32


@dataclass(frozen=True)
class PredictorFile:
    """The content of a file. `about`: further metadata, such as the target model or metrics."""

    model: LengthModel
    formulation: Formulation
    tokenizer: Tokenizer
    name: str
    about: dict[str, str]
    #: Maximum tokens of a text that it was trained to read.
    longest: int
    #: Quantised matrices of the encoder as they are stored, by dotted name in the encoder.
    matrices: Mapping[str, StoredMatrix] = field(default_factory=dict)


def write(predictor: PredictorFile, path: Path) -> None:
    """Write the file atomically. The encoder's matrices are rounded to INT8, its token embedding to Q4_0 where rows are
    whole blocks; the small head stays float32."""
    tensors: Weights = {
        _TOKENIZER: np.frombuffer(lzma.compress(predictor.tokenizer.to_str().encode(), preset=9), np.uint8)
    }
    for name, value in weights_of(predictor.model).items():
        if name == _EMBEDDING and value.shape[1] % _BLOCK == 0:
            tensors[name] = quantize(np.asarray(value, np.float32), GGMLQuantizationType[_BLOCKS])
        elif value.ndim == 2 and name.startswith("encoder."):
            tensors |= quantized(name, value, rows=name.endswith("embedding"))
        else:
            tensors[name] = value
    metadata = {
        "format": f"{_KIND}-{_VERSION}",
        "name": predictor.name,
        "longest": str(predictor.longest),
        "encoder": json.dumps(asdict(predictor.model.encoder.config)),
        "formulation": json.dumps(predictor.formulation.to_dict()),
        "about": json.dumps(predictor.about),
    }
    metadata["digest"] = _digest(tensors, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        save_file(tensors, new, metadata)


def read(path: Path) -> PredictorFile:
    """Read a file from `write`. Raises `ModelLoadError` with the reason if it is damaged or something else."""
    metadata, stored = read_tensors(path, "predictor")
    kind, _, version = metadata.get("format", "").rpartition("-")
    if kind != _KIND:
        raise ModelLoadError(f"{path} is not a length predictor trained by jaxspec.train_predictor")
    if version not in (_VERSION, _FORMER):
        raise ModelLoadError(f"predictor {path} has format {version:.50}, this version of jaxspec reads {_VERSION}")
    digest = metadata.pop("digest", "")
    if digest != _digest(stored, metadata):
        raise ModelLoadError(f"predictor {path} is damaged: its content does not match its digest")
    with blaming(f"predictor {path}", "it is damaged"):
        try:
            return _predictor(stored, metadata, f"predictor {path}", version == _VERSION)
        except KeyError as error:
            raise ModelLoadError(f"predictor {path}: {error.args[0]!s:.200} is missing") from None


def _predictor(stored: dict[str, np.ndarray], metadata: dict[str, str], where: str, compressed: bool) -> PredictorFile:
    config = BertConfig(**json.loads(metadata["encoder"]))
    formulation = Formulation.from_dict(json.loads(metadata["formulation"]))
    try:
        text = stored.pop(_TOKENIZER).tobytes()
        tokenizer = Tokenizer.from_str((lzma.decompress(text) if compressed else text).decode())
    except Exception as error:  # what the Rust side raises is a bare Exception
        raise ModelLoadError(f"{where}: cannot read its tokenizer ({error!s:.300})") from None
    matrices = _matrices(stored)
    weights = dict(restored(stored))
    if (embedding := matrices["tokens.embedding"]).kind == _BLOCKS:
        weights[_EMBEDDING] = embedding.floats()
    width = weights["head.inner.bias"].size

    def make() -> LengthModel:
        rngs = nnx.Rngs(0)
        return LengthModel(BertEncoder(config, rngs), LengthHead(config.hidden, width, formulation.outputs, rngs))

    model = filled(make, weights, where)
    about, longest = json.loads(metadata["about"]), int(metadata["longest"])
    return PredictorFile(model, formulation, tokenizer, metadata["name"], about, longest, matrices)


def _matrices(stored: Weights) -> dict[str, StoredMatrix]:
    """The encoder's quantised matrices `[out, in]`; an embedding is `[vocab, hidden]`."""

    def matrix(name: str, codes: np.ndarray) -> StoredMatrix:
        return StoredMatrix.int8(codes if name.endswith("embedding") else codes.T, stored[f"{name}.scale"])

    small = {name: value for name, value in stored.items() if value.dtype == np.int8}
    found = {name.removeprefix("encoder."): matrix(name, codes) for name, codes in small.items()}
    if (blocks := stored[_EMBEDDING]).dtype == np.uint8:
        vocab, hidden = quant_shape_from_byte_shape(blocks.shape, GGMLQuantizationType[_BLOCKS])
        found["tokens.embedding"] = StoredMatrix(_BLOCKS, (vocab, hidden), lambda: blocks)
    return found


def _digest(tensors: Weights, metadata: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype.str} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()
