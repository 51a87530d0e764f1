"""Loads the tokenizer of a Hugging Face folder with transformers, without torch and without running a model's code.

A tokenizer.json is taken as it is, by transformers' class for that (`PreTrainedTokenizerFast`). `AutoTokenizer` is not
asked: from version 5 it rebuilds many tokenizers from the vocabulary and the rules of a class that it knows. For the
recorded qwen2 model that adds a token without an embedding and another normalisation; for SentencePiece models " two"
gets other ids than from tokenizer.json and from sentencepiece itself. It also imports torch where that is installed.
Folders without a tokenizer.json have only the class, so there `AutoTokenizer` decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from jaxspec.errors import ModelLoadError
from jaxspec.extras import install_hint
from jaxspec.models.load.files import blaming, read_json
from jaxspec.models.load.lazy_transformers import import_transformers
from jaxspec.models.load.tokenizer import Tokenizer, end_token_ids

_WHOLE = "tokenizer.json"
#: Files that name special tokens.
_SETTINGS = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
#: A tokenizer that fits its vocabulary reproduces this text.
_SAMPLE = "The quick brown fox jumps over the lazy dog, 12345 times."


def load_tokenizer(folder: Path, eos_token_ids: Sequence[int | None] = ()) -> Tokenizer:
    """Load the folder's tokenizer with special tokens and chat templates.

    `eos_token_ids`: end tokens that the model declares. Raises `ModelLoadError`.
    """
    vocabulary = _vocabulary_file(folder)
    with blaming(str(vocabulary), "it does not fit the folder's other files"):
        return _load(folder, vocabulary, eos_token_ids)


def _load(folder: Path, vocabulary: Path, eos_token_ids: Sequence[int | None]) -> Tokenizer:
    settings = {name: read_json(folder / name) for name in _SETTINGS if (folder / name).is_file()}
    loaded = _read(folder, vocabulary)
    backend, named = loaded.backend_tokenizer, loaded.special_tokens_map
    if vocabulary.name == "vocab.json":
        backend, named = _without_defaults(backend, named, settings)
    if vocabulary.name != _WHOLE:
        _check(backend, vocabulary)
    backend.no_padding()
    backend.no_truncation()
    templates = loaded.chat_template
    if not isinstance(templates, Mapping):
        templates = {"default": templates}
    if not all(isinstance(templates.get(name), str | None) for name in ("default", "tool_use")):
        raise ModelLoadError(f"{folder}: the chat template must be a text")
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return Tokenizer(
        backend=backend,
        eos_token_ids=end_token_ids(backend, [*eos_token_ids, eos]),
        bos_token_id=backend.token_to_id(named["bos_token"]) if "bos_token" in named else None,
        chat_template=templates.get("default"),
        template_tokens=named,
        tool_template=templates.get("tool_use"),
    )


def _read(folder: Path, vocabulary: Path) -> Any:
    """The tokenizer as an object of transformers. Raises `ModelLoadError`."""
    transformers = import_transformers()
    try:
        loader = transformers.PreTrainedTokenizerFast if vocabulary.name == _WHOLE else transformers.AutoTokenizer
        return loader.from_pretrained(str(folder.absolute()), local_files_only=True, trust_remote_code=False)
    except BaseException as e:  # transformers raises many types: ValueError, OSError, …; a panic is no Exception
        if isinstance(e, KeyboardInterrupt):
            raise
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        if vocabulary.name == _WHOLE:
            raise ModelLoadError(f"{vocabulary}: not a readable tokenizer ({reason})") from e
        if "trust_remote_code" in str(e):
            raise _unusable(
                vocabulary, "its tokenizer is Python code that comes with the model, which is never run"
            ) from e
        raise _unusable(vocabulary, f"transformers can't convert it ({reason})") from e


def _vocabulary_file(folder: Path) -> Path:
    """tokenizer.json, or the file that is converted: vocab.json (with merges.txt), or a SentencePiece tokenizer.model.

    Other files are not tried: some old formats are pickles, which are never loaded. Raises `ModelLoadError` if there is
    none, or a package to read it is missing.
    """
    whole, bpe, pieces = folder / _WHOLE, folder / "vocab.json", folder / "tokenizer.model"
    if whole.is_file():
        return whole
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


def _without_defaults(
    backend: tokenizers.Tokenizer, named: Mapping[str, str], settings: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Backend and named special tokens, without those that neither the vocabulary nor the folder's files have.

    transformers appends the defaults of the tokenizer class (GPT-2's `<|endoftext|>`) to the vocabulary, where the
    model has no embeddings.
    """
    spec, known = json.loads(backend.to_str()), json.dumps(settings, ensure_ascii=False)
    vocabulary = spec["model"]["vocab"]
    foreign = {t["content"] for t in spec["added_tokens"] if t["content"] not in vocabulary}
    foreign = {text for text in foreign if json.dumps(text, ensure_ascii=False) not in known}
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in foreign]
    kept = {name: text for name, text in named.items() if text not in foreign}
    return tokenizers.Tokenizer.from_str(json.dumps(spec)), kept


def _check(backend: tokenizers.Tokenizer, vocabulary: Path) -> None:
    """Raise `ModelLoadError` if the tokenizer does not fit its vocabulary.

    transformers takes the tokenizer class from tokenizer_config.json or guesses it from the architecture. A wrong class
    does not fail, it drops text.
    """
    if vocabulary.name == "vocab.json":
        moved = [text for text, id in read_json(vocabulary).items() if backend.token_to_id(text) != id]
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
