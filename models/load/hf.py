"""Loads Hugging Face folders: safetensors, tokenizer and chat template, local or from the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.hf_config import decoder_config
from jaxspec.models.load.hf_tokenizer import SPECIAL, read_backend
from jaxspec.models.load.loaded import LoadedModel
from jaxspec.models.load.stored import FLOATS, StoredMatrix
from jaxspec.models.load.tokenizer import Tokenizer, end_token_ids
from jaxspec.models.load.weights import HF_NAMES, check_tensors, lazy_weights

_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model*.safetensors",
)


def download(repo: str) -> Path:
    """Path of the local copy of `owner/name`, downloaded if needed. Raises `ModelLoadError` if that fails."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=list(_FILES)))
    except GatedRepoError as e:
        hint = "its owner must grant access: ask on its page, then run `hf auth login`"
        raise ModelLoadError(f"hub model {repo!r}: {hint}") from e
    except RepositoryNotFoundError as e:
        hint = "there is no such model, or it is private and needs `hf auth login`"
        raise ModelLoadError(f"hub model {repo!r}: {hint} (for a local folder, pass its path)") from e
    except LocalEntryNotFoundError as e:
        reason = "the hub can't be reached and there is no local copy"
        raise ModelLoadError(f"hub model {repo!r}: {reason}; run `hf download {repo}` where there is a network") from e
    except Exception as e:  # the HTTP client's errors differ between versions
        raise ModelLoadError(f"hub model {repo!r}: the download failed ({type(e).__name__}: {e})") from e


_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
#: Type in a safetensors file -> dtype in which its tensors are read.
_READ_AS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float32}


class SafetensorsFolder:
    """Memory-mapped tensors of a folder. Raises `ModelLoadError` if files are missing or damaged."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files = [_open(folder / name) for name in self._file_names()]
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
        names = sorted(set(shards.values()))
        for name in names:
            if Path(name).name != name:
                raise ModelLoadError(f"{self.folder / _INDEX}: shard {name!r} lies outside the folder")
            if not (self.folder / name).is_file():
                raise ModelLoadError(f"{self.folder}: shard {name} is missing; is the download complete?")
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

    def matrix(self, name: str) -> StoredMatrix:
        rows, columns = self._shapes[name]
        kind = self._types[name] if self._types[name] in FLOATS else "F32"
        return StoredMatrix(kind, (rows, columns), lambda: self.read(name))


def load_folder(folder: Path, name: str) -> LoadedModel:
    """Load a model folder. Raises `ModelLoadError`."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelLoadError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    raw = read_json(config_file)
    config = decoder_config(raw, str(config_file))
    tensors = SafetensorsFolder(folder)
    check_tensors(config, tensors, HF_NAMES, ignored=_unused(config, tensors), where=str(folder))
    generation = _optional_json(folder / "generation_config.json")
    declared = generation.get("eos_token_id", raw.get("eos_token_id"))
    tokenizer = load_tokenizer(folder, declared if isinstance(declared, list) else [declared])
    config = replace(config, eos_token_ids=tokenizer.eos_token_ids, bos_token_id=tokenizer.bos_token_id)
    return LoadedModel(config, lazy_weights(config, tensors, HF_NAMES), tokenizer, name)


def load_tokenizer(folder: Path, eos_token_ids: Sequence[int | None] = ()) -> Tokenizer:
    """Load the folder's tokenizer with special tokens and chat template.

    `eos_token_ids`: end tokens that the model declares. Raises `ModelLoadError`.
    """
    backend, named = read_backend(folder)
    backend.no_padding()
    backend.no_truncation()
    settings = _optional_json(folder / "special_tokens_map.json") | _optional_json(folder / "tokenizer_config.json")
    for key in SPECIAL:
        value = settings.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[key] = text
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return Tokenizer(
        backend=backend,
        eos_token_ids=end_token_ids(backend, [*eos_token_ids, eos]),
        bos_token_id=backend.token_to_id(named["bos_token"]) if "bos_token" in named else None,
        chat_template=_chat_template(folder, settings),
        template_tokens=named,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ModelLoadError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e  # str(e) would repeat the path
        raise ModelLoadError(f"{path}: not readable as JSON ({reason})") from e
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object")
    return value


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        template = {t["name"]: t["template"] for t in template if isinstance(t, dict)}.get("default")
    return template if isinstance(template, str) else None


def _unused(config: DecoderConfig, tensors: SafetensorsFolder) -> list[str]:
    """Tensors to ignore: the copy of a tied head, rotary tables, and output biases that are all zero."""
    unused = [name for name in tensors.shapes if name.endswith("rotary_emb.inv_freq")]
    if config.tie_embeddings:
        unused.append(HF_NAMES["head"])
    biases = (name for name in tensors.shapes if name.endswith("self_attn.o_proj.bias"))
    return unused + [name for name in biases if not tensors.read(name).any()]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as e:
        raise ModelLoadError(f"{path}: not a readable safetensors file ({e}); is the download complete?") from e
