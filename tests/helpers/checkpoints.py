"""Small random checkpoints in other programs' formats: Hugging Face folders and GGUF files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import save_file

from helpers.paths import GOLDEN
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.gguf_layouts import PLAIN
from jaxspec.models.load.hf_layouts import LLAMA
from jaxspec.models.load.parts import part_shapes

Tensors = dict[str, np.ndarray]


def config(**changes: Any) -> DecoderConfig:
    """A small configuration. Every axis is a multiple of 32, GGUF's block size."""
    sizes: dict[str, Any] = dict(
        family="llama", vocab_size=320, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, max_position=256,
    )  # fmt: skip
    return DecoderConfig(**{**sizes, **changes})


def tensors(c: DecoderConfig, names: Mapping[str, str]) -> Tensors:
    """Random float32 tensors under a checkpoint's names: matrices `[out, in]`, q and k rows in halves."""
    rng = np.random.default_rng(0)
    return {
        names[part].format(layer): rng.normal(size=shape).astype(np.float32)
        for part, shape in part_shapes(c).items()
        for layer in (range(c.num_layers) if "{}" in names[part] else (0,))
    }


def hf_tensors(c: DecoderConfig) -> Tensors:
    return tensors(c, LLAMA.names)


def write_hf(folder: Path, c: DecoderConfig, shards: list[Tensors], **extra: Any) -> Path:
    """Write a Hugging Face folder with the recorded models' tokenizer; with several shards also an index."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position,
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": c.qkv_bias,
        "rms_norm_eps": c.norm_eps,
    }
    (folder / "config.json").write_text(json.dumps(raw | extra))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(GOLDEN / "llama" / name, folder / name)
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
    index = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order: row i of a head's first half is followed by row i of its second half."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(rows.shape)


def write_gguf(
    path: Path,
    c: DecoderConfig,
    stored: Tensors,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    vocabulary: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write a GGUF file with `stored`, named as by `tensors(c, PLAIN.names)`. Matrices are quantised as `kind`."""
    writer = gguf.GGUFWriter(path, c.family)
    header = {
        "context_length": c.max_position,
        "embedding_length": c.hidden_size,
        "block_count": c.num_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "rope.freq_base": float(c.rope_theta),
        "attention.layer_norm_rms_epsilon": c.norm_eps,
    }
    fields = {f"{c.family}.{key}": value for key, value in header.items()}
    fields |= byte_vocabulary() if vocabulary is None else vocabulary
    add_fields(writer, fields | dict(extra or {}))
    for name, tensor in stored.items():
        if c.family == "llama" and (".attn_q." in name or ".attn_k." in name):
            tensor = interleave(tensor, c.head_dim)
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    finish(writer)
    return path


def add_fields(writer: gguf.GGUFWriter, fields: Mapping[str, Any]) -> None:
    """Add fields of a header, each with the type of its value."""
    for key, value in fields.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(c: DecoderConfig) -> Tensors:
    return tensors(c, PLAIN.names)


def byte_vocabulary(pre: str = "smollm") -> dict[str, Any]:
    """The recorded models' tokenizer as fields of a GGUF header."""
    spec = json.loads((GOLDEN / "llama" / "tokenizer.json").read_text())
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    special = {token["content"] for token in spec["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": (GOLDEN / "llama" / "chat_template.jinja").read_text(),
    }
