"""Loads Hugging Face folders: safetensors, tokenizer, chat template and generation config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.files import blaming, read_json
from jaxspec.models.load.generation_config import read_generation_config, sampling_of
from jaxspec.models.load.hf_config import decoder_config
from jaxspec.models.load.hf_families import FAMILIES
from jaxspec.models.load.hf_quantized import NARROW, Dequantized, quantization
from jaxspec.models.load.hf_tokenizer import load_tokenizer
from jaxspec.models.load.layout import Layout
from jaxspec.models.load.loaded import LoadedModel
from jaxspec.models.load.stored import FLOATS, StoredMatrix
from jaxspec.models.load.weights import TensorSource, check_tensors, lazy_weights

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
#: Type in a safetensors file -> dtype in which its tensors are read.
_READ_AS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float32}


class SafetensorsFolder:
    """Memory-mapped tensors of a folder. Raises `ModelLoadError` if files are missing or damaged."""

    def __init__(self, folder: Path):
        self.folder = folder
        paths = [folder / name for name in self._file_names()]
        self._files = [_open(path) for path in paths]
        self._path_of = {key: path for path, file in zip(paths, self._files, strict=True) for key in [*file.keys()]}
        self._file_of = {key: file for file in self._files for key in file.keys()}  # noqa: SIM118
        slices = {key: file.get_slice(key) for key, file in self._file_of.items()}
        self._shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
        self._types: dict[str, str] = {key: part.get_dtype() for key, part in slices.items()}

    def _file_names(self) -> list[str]:
        if (self.folder / _WHOLE).is_file():
            return [_WHOLE]
        if not (self.folder / _INDEX).is_file():
            if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*")):
                raise ModelLoadError(
                    f"{self.folder} has only pickled weights (.bin/.pt), which can run code and are never loaded; "
                    "convert them with transformers: save_pretrained(…) writes safetensors"
                )
            raise ModelLoadError(f"{self.folder} has neither {_WHOLE} nor {_INDEX}")
        shards = read_json(self.folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelLoadError(f"{self.folder / _INDEX}: no weight_map")
        if not all(isinstance(name, str) and len(name) < 256 for name in shards.values()):
            raise ModelLoadError(f"{self.folder / _INDEX}: weight_map must hold names of files")
        names = sorted(set(shards.values()))
        for name in names:
            if Path(name).name != name or "\0" in name:
                raise ModelLoadError(f"{self.folder / _INDEX}: shard {name!r:.200} lies outside the folder")
            if not (self.folder / name).is_file():
                raise ModelLoadError(f"{self.folder}: shard {name:.200} is missing; is the download complete?")
        return names

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def check(self, name: str) -> None:
        """Raise `ModelLoadError` unless the tensor's type is supported."""
        if (kind := self._types[name]) not in _READ_AS:
            raise ModelLoadError(f"{self.folder}: tensor {name} is of type {kind}; {', '.join(_READ_AS)} can be read")

    def read(self, name: str) -> np.ndarray:
        """Read a tensor in its stored dtype, float64 as float32. Raises `ModelLoadError` for unsupported types."""
        self.check(name)
        return np.asarray(self._file_of[name].get_tensor(name)).astype(_READ_AS[self._types[name]], copy=False)

    def kind(self, name: str) -> str:
        return self._types[name]

    def raw(self, name: str) -> np.ndarray:
        """Read a tensor in its stored dtype, also numbers of 8 bits. Raises `ModelLoadError` for other types."""
        if (kind := self._types[name]) not in NARROW:
            return self.read(name)
        # The library does not read float8 into numpy.
        path = self._path_of[name]
        begin, end = _places(path)[name]
        data = np.memmap(path, np.uint8, "r", begin, end - begin)
        return data.view(NARROW[kind]).reshape(self._shapes[name])

    def matrix(self, name: str) -> StoredMatrix:
        rows, columns = self._shapes[name]  # experts have a tensor each
        kind = self._types[name] if self._types[name] in FLOATS else "F32"
        return StoredMatrix(kind, (rows, columns), lambda: self.read(name))


def load_folder(folder: Path, name: str) -> LoadedModel:
    """Load a model folder. Raises `ModelLoadError`."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelLoadError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    raw = read_json(config_file)
    with blaming(str(config_file), "a setting is missing or of a wrong type"):
        config = decoder_config(raw, str(config_file))
        scheme = quantization(raw, str(config_file))
    stored = SafetensorsFolder(folder)
    tensors = stored if scheme is None else Dequantized(stored, scheme, str(folder))
    layout = _layout(config, tensors)
    # The copy of a tied head is not used.
    unused = [layout.names["head"]] if config.tie_embeddings else []
    check_tensors(config, tensors, layout, ignored=unused, where=str(folder))
    generation = read_generation_config(folder)
    declared = None if generation is None else generation.eos_token_id
    if declared is None:
        declared = raw.get("eos_token_id")
    declared = declared if isinstance(declared, list) else [declared]
    if not all(id is None or (isinstance(id, int) and id >= 0) for id in declared):
        raise ModelLoadError(f"{folder}: eos_token_id must be a token id or a list of them, not {declared!r:.200}")
    tokenizer = load_tokenizer(folder, declared)
    # An end token without an embedding can never be sampled.
    ends = tuple(id for id in tokenizer.eos_token_ids if id < config.vocab_size)
    tokenizer = replace(tokenizer, eos_token_ids=ends)
    config = replace(config, eos_token_ids=tokenizer.eos_token_ids, bos_token_id=tokenizer.bos_token_id)
    sampling = {} if generation is None else sampling_of(generation)
    return LoadedModel(config, lazy_weights(config, tensors, layout), tokenizer, name, sampling)


def _layout(config: DecoderConfig, tensors: TensorSource) -> Layout:
    """The family's layout, with names as this checkpoint begins them."""
    layout = FAMILIES[config.family].layout
    if layout.prefix and not any(name.startswith(layout.prefix) for name in tensors.shapes):
        return layout.without_prefix()
    return layout


@lru_cache(4)
def _places(path: Path) -> dict[str, tuple[int, int]]:
    """Begin and end of each tensor in a file, which is the length of a header, the header, and the data."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (8 + size + begin, 8 + size + end) for name, (begin, end) in offsets.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as e:
        raise ModelLoadError(f"{path}: not a readable safetensors file ({e!s:.300}); is the download complete?") from e
