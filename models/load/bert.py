"""Loads BERT encoders: a built-in name or a Hugging Face folder.

A checkpoint's pooler and pre-training heads are ignored. Nothing is unpickled and no code is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from tokenizers import Tokenizer
from tokenizers.implementations import BertWordPieceTokenizer  # pyright: ignore[reportPrivateImportUsage]
from tokenizers.models import WordPiece

from jaxspec.errors import ModelLoadError
from jaxspec.models.bert import ACTIVATIONS, BertConfig, BertEncoder
from jaxspec.models.load.files import filled, read_json, shapes_of
from jaxspec.models.load.hf import SafetensorsFolder
from jaxspec.models.load.registry import ENCODERS, fetch_all
from jaxspec.models.load.weights import Weights

#: Weight without its layer prefix -> the checkpoint's tensors without "bert." and "encoder.layer.N."; several are
#: concatenated.
_EMBEDDINGS = {
    "tokens.embedding": ("embeddings.word_embeddings.weight",),
    "positions.embedding": ("embeddings.position_embeddings.weight",),
    "types.embedding": ("embeddings.token_type_embeddings.weight",),
    "norm.scale": ("embeddings.LayerNorm.weight",),
    "norm.bias": ("embeddings.LayerNorm.bias",),
}
_BLOCK = {
    "qkv.kernel": tuple(f"attention.self.{part}.weight" for part in ("query", "key", "value")),
    "qkv.bias": tuple(f"attention.self.{part}.bias" for part in ("query", "key", "value")),
    "o.kernel": ("attention.output.dense.weight",),
    "o.bias": ("attention.output.dense.bias",),
    "attn_norm.scale": ("attention.output.LayerNorm.weight",),
    "attn_norm.bias": ("attention.output.LayerNorm.bias",),
    "up.kernel": ("intermediate.dense.weight",),
    "up.bias": ("intermediate.dense.bias",),
    "down.kernel": ("output.dense.weight",),
    "down.bias": ("output.dense.bias",),
    "mlp_norm.scale": ("output.LayerNorm.weight",),
    "mlp_norm.bias": ("output.LayerNorm.bias",),
}
#: Prefixes of ignored tensors: heads, and buffers of older versions.
_UNUSED = ("pooler.", "cls.", "classifier.", "qa_outputs.", "embeddings.position_ids", "embeddings.token_type_ids")


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder with its configuration and tokenizer."""

    config: BertConfig
    encoder: BertEncoder
    tokenizer: Tokenizer


def load_bert(source: str | Path, layers: int | None = None) -> LoadedEncoder:
    """`source`: "all-minilm-l6-v2", or a folder with config.json, model.safetensors, and tokenizer.json or vocab.txt.

    `layers`: keep only the first layers. Raises `ModelLoadError` naming the problem.
    """
    folder = _folder(str(source))
    raw = read_json(folder / "config.json")
    config = bert_config(raw, str(folder / "config.json"))
    if layers is not None and not 1 <= layers <= config.layers:
        raise ModelLoadError(f"layers must be between 1 and {config.layers}, those of {source}, not {layers}")
    weights = _weights(config, SafetensorsFolder(folder), str(folder), config.layers if layers is None else layers)
    config = replace(config, layers=config.layers if layers is None else layers)
    tokenizer = _tokenizer(folder)
    if (size := max(tokenizer.get_vocab().values()) + 1) > config.vocab_size:
        raise ModelLoadError(f"{folder}: the tokenizer has {size} tokens, the model only {config.vocab_size}")
    encoder = filled(lambda: BertEncoder(config, nnx.Rngs(0)), weights, str(folder))
    return LoadedEncoder(config, encoder, tokenizer)


def check_encoder(source: str) -> None:
    """Raises `ModelLoadError` if there is no such encoder. Neither downloads nor loads it."""
    if source in ENCODERS:
        return
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise ModelLoadError(
            f"no encoder {source!r}: neither a built-in name ({', '.join(ENCODERS)}), nor a Hugging Face folder"
        )
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json: it is not a Hugging Face model folder")


def _folder(source: str) -> Path:
    check_encoder(source)
    return fetch_all(ENCODERS[source])[0].parent if source in ENCODERS else Path(source).expanduser()


def bert_config(raw: Mapping[str, Any], where: str) -> BertConfig:
    """Convert a `config.json`. Raises `ModelLoadError` naming an unsupported setting."""
    if (family := raw.get("model_type")) != "bert":
        raise ModelLoadError(f"{where}: model_type {family!r} is not supported for an encoder; bert is")
    if (kind := raw.get("position_embedding_type") or "absolute") != "absolute":
        raise ModelLoadError(f"{where}: position_embedding_type {kind!r} is not supported; absolute is")
    if (activation := raw.get("hidden_act", "gelu")) not in ACTIVATIONS:
        raise ModelLoadError(f"{where}: hidden_act {activation!r} is not supported; {', '.join(ACTIVATIONS)} are")
    for switch in ("is_decoder", "add_cross_attention", "quantization_config"):
        if raw.get(switch):
            raise ModelLoadError(f"{where}: {switch} is not supported for an encoder")

    def number(key: str, default: int) -> int:
        value = raw.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelLoadError(f"{where}: {key} must be a positive whole number, not {value!r}")
        return value

    eps = raw.get("layer_norm_eps", 1e-12)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise ModelLoadError(f"{where}: layer_norm_eps must be a small positive number, not {eps!r}")
    hidden, heads = number("hidden_size", 768), number("num_attention_heads", 12)
    if hidden % heads:
        raise ModelLoadError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return BertConfig(
        vocab_size=number("vocab_size", 30522),
        hidden=hidden,
        layers=number("num_hidden_layers", 12),
        heads=heads,
        intermediate=number("intermediate_size", 3072),
        max_positions=number("max_position_embeddings", 512),
        type_vocab=number("type_vocab_size", 2),
        eps=eps,
        activation=activation,
    )


def _weights(config: BertConfig, tensors: SafetensorsFolder, where: str, layers: int) -> Weights:
    """Weights of the first `layers`. The tensors of all layers are checked."""
    names = {_plain(name): name for name in tensors.shapes}
    parts = dict(_EMBEDDINGS)
    for i in range(config.layers):
        parts |= {f"layers.{i}.{p}": tuple(f"encoder.layer.{i}.{t}" for t in ts) for p, ts in _BLOCK.items()}
    wanted = {name for tensors_of in parts.values() for name in tensors_of}
    if missing := sorted(wanted - names.keys()):
        raise ModelLoadError(
            f"{where}: tensor {missing[0]} missing"
            + (f", and {len(missing) - 1} more" if missing[1:] else "")
            + "; is the download complete?"
        )
    if extra := sorted(name for name in names.keys() - wanted if not name.startswith(_UNUSED)):
        raise ModelLoadError(f"{where}: unexpected tensor {extra[0]}; config.json describes an encoder without it")
    for name, shape in shapes_of(lambda: BertEncoder(config, nnx.Rngs(0))).items():
        joined = parts[name]
        expected = (*shape[:-1], shape[-1] // len(joined))
        expected = expected[::-1] if name.endswith("kernel") else expected
        for tensor in joined:
            if (found := tensors.shapes[names[tensor]]) != expected:
                raise ModelLoadError(
                    f"{where}: tensor {tensor} has shape {list(found)}, config.json says {list(expected)}"
                )

    def read(name: str) -> np.ndarray:
        joined = np.concatenate([tensors.read(names[tensor]) for tensor in parts[name]])
        return np.ascontiguousarray(joined.T) if name.endswith("kernel") else joined

    dropped = tuple(f"layers.{i}." for i in range(layers, config.layers))
    return {name: read(name) for name in parts if not name.startswith(dropped)}


def _plain(name: str) -> str:
    """Tensor name without the model's prefix, with the current names of layer norm weights."""
    return (
        name.removeprefix("bert.")
        .replace("LayerNorm.gamma", "LayerNorm.weight")
        .replace("LayerNorm.beta", "LayerNorm.bias")
    )


def _tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json, else build a WordPiece tokenizer from vocab.txt. Raises `ModelLoadError`."""
    whole, words = folder / "tokenizer.json", folder / "vocab.txt"
    if not whole.is_file() and not words.is_file():
        raise ModelLoadError(f"{folder} has neither tokenizer.json nor vocab.txt")
    path = whole if whole.is_file() else words
    try:
        tokenizer = Tokenizer.from_file(str(whole)) if whole.is_file() else _word_pieces(folder, words)
    except Exception as e:  # the Rust library raises a bare Exception
        raise ModelLoadError(f"{path}: not a readable tokenizer ({e})") from e
    for mark in ("[CLS]", "[SEP]"):
        if tokenizer.token_to_id(mark) is None:
            raise ModelLoadError(f"{path}: the vocabulary has no token {mark}, which BERT inputs start or end with")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _word_pieces(folder: Path, words: Path) -> Tokenizer:
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    made = BertWordPieceTokenizer(
        WordPiece.read_file(str(words)),
        lowercase=bool(settings.get("do_lower_case", True)),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
    )
    return Tokenizer.from_str(made.to_str())
