"""Reads the tokenizer of a Hugging Face folder: tokenizer.json, or older vocabulary files through transformers."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from jaxspec.errors import ModelLoadError
from jaxspec.extras import install_hint

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
#: A tokenizer that fits its vocabulary reproduces this text.
_SAMPLE = "The quick brown fox jumps over the lazy dog, 12345 times."


def read_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Read the tokenizer and, if it had to be converted, its special tokens by name. Raises `ModelLoadError`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(path)), {}
    except Exception as e:  # the Rust library raises a bare Exception
        raise ModelLoadError(f"{path}: not a readable tokenizer ({e})") from e


def _convert(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Convert BPE files (vocab.json and merges.txt) or a SentencePiece tokenizer.model.

    Other files are not tried: some old formats are pickles, which are never loaded.
    """
    vocabulary = _vocabulary_file(folder)
    # Imported here: it takes a second, and most folders have a tokenizer.json. The variable suppresses a warning on
    # stderr that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(
            str(folder.absolute()), local_files_only=True, trust_remote_code=False
        )
        spec = json.loads(converted.backend_tokenizer.to_str())
        special = {name: getattr(converted, name) for name in SPECIAL}
        if vocabulary.name == "vocab.json":
            _drop_defaults(spec, special, folder)
        backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as e:  # transformers raises many types: ValueError, OSError, AttributeError, …
        reason = f"transformers can't convert it ({type(e).__name__}: {' '.join(str(e).split())[:300]})"
        if "trust_remote_code" in str(e):
            reason = "its tokenizer is Python code that comes with the model, which is never run"
        raise _unusable(vocabulary, reason) from e
    _check(backend, vocabulary)
    return backend, {name: text for name, text in special.items() if text is not None}


def _vocabulary_file(folder: Path) -> Path:
    """Path of the vocabulary file. Raises `ModelLoadError` if there is none, or a package to read it is missing."""
    bpe, pieces = folder / "vocab.json", folder / "tokenizer.model"
    if bpe.is_file() and (folder / "merges.txt").is_file():
        return bpe
    if not pieces.is_file():
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, nor vocab.json with merges.txt, nor tokenizer.model; is the download "
            "complete?"
        )
    if not (_installed("sentencepiece") and _installed("google.protobuf")):
        raise ModelLoadError(
            f"{pieces}: without a tokenizer.json, reading it needs sentencepiece: {install_hint('sentencepiece')}"
        )
    return pieces


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _drop_defaults(spec: dict[str, Any], special: dict[str, str | None], folder: Path) -> None:
    """Remove special tokens that neither the vocabulary nor the folder's JSON files contain.

    transformers appends the defaults of the tokenizer class (GPT-2's `<|endoftext|>`) to the vocabulary, where the
    model has no embeddings.
    """
    settings = [_json(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    known = json.dumps([_json(folder / "added_tokens.json"), *settings], ensure_ascii=False)
    vocabulary = spec["model"]["vocab"]
    foreign = {t["content"] for t in spec["added_tokens"] if t["content"] not in vocabulary}
    foreign = {text for text in foreign if json.dumps(text, ensure_ascii=False) not in known}
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in foreign]
    for name, text in special.items():
        special[name] = None if text in foreign else text


def _check(backend: tokenizers.Tokenizer, vocabulary: Path) -> None:
    """Raise `ModelLoadError` if the tokenizer does not fit its vocabulary.

    transformers takes the tokenizer class from tokenizer_config.json or guesses it from the architecture. A wrong class
    does not fail, it drops text.
    """
    if vocabulary.name == "vocab.json":
        moved = [text for text, id in _json(vocabulary).items() if backend.token_to_id(text) != id]
        if moved:
            raise _unusable(vocabulary, f"the converted tokenizer gives {moved[0]!r} another id")
    text = backend.decode(backend.encode(_SAMPLE, add_special_tokens=False).ids)
    if text.strip() != _SAMPLE:
        raise _unusable(vocabulary, f"the converted tokenizer turns {_SAMPLE!r} into {text[:80]!r}")


def _unusable(vocabulary: Path, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"{vocabulary}: the folder has no tokenizer.json, and {why}; check tokenizer_class in "
        "tokenizer_config.json, or create a tokenizer.json where the model's own tokenizer works: "
        "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return value
