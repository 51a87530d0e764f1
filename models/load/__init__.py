"""Loads decoders: `load_model` takes a built-in name, a Hugging Face folder, a `.gguf` file or a hub id.

Weights are numpy arrays by name, read from the memory-mapped checkpoint when they are used (`LazyWeights`) in the dtype
in which they are stored: float32, bfloat16 or float16; GGUF tensors are dequantised to float32. Everything is checked
when a model is loaded, before a weight is read. Matrices are `[in, out]`, in any memory order, and fused. L is the
layer:

    embed [vocab, hidden]          norm [hidden]            head [hidden, vocab] (absent when tied to embed)
    positions [max_position, hidden] (learned positions)
    layers.L.attn_norm, mlp_norm [hidden] (norms before blocks)     post_attn_norm, post_mlp_norm [hidden] (after them)
    layers.L.qkv [hidden, q_size + 2 * kv_size]             layers.L.o [q_size, hidden]
    layers.L.q_norm, layers.L.k_norm [head_dim], or of all heads
    layers.L.gate_up [hidden, 2 * intermediate], or [hidden, intermediate] without a gate
    layers.L.down [intermediate, hidden]
    layers.L.router [hidden, experts]                       layers.L.experts_gate_up [experts, hidden, 2 * width]
    layers.L.experts_down [experts, width, hidden]
    NAME_bias, of matrices and norms that have one

`load/parts.py` says which of them a configuration has.

Nothing is unpickled and no code from a checkpoint is run.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

from jaxspec.errors import ModelLoadError
from jaxspec.models.load.loaded import Header, LoadedModel, load_header, save_header
from jaxspec.models.load.registry import DEFAULT_MODEL, TABLE, Entry, fetch, verify
from jaxspec.models.load.tokenizer import Tokenizer

__all__ = ["DEFAULT_MODEL", "TABLE", "LoadedModel", "ModelLoadError", "Tokenizer", "load_model"]

log = logging.getLogger(__name__)

#: owner/name, and the quantisation of a .gguf file in it.
_HUB_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+))?\Z")


def load_model(name_or_path: str, revision: str | None = None) -> LoadedModel:
    """Load configuration and tokenizer, check the weights.

    A hub id is `owner/name`, or `owner/name:Q4_K_M` for a .gguf file; `revision` is its branch, tag or commit. Raises
    `ModelLoadError` with the problem and a remedy.
    """
    path = Path(name_or_path).expanduser()
    hub_id = None if path.suffix == ".gguf" or path.exists() else _HUB_ID.match(name_or_path)
    if hub_id is not None:
        from jaxspec.models.load.hub import fetch_model

        path = fetch_model(hub_id[1], hub_id[2], revision)
        return _load_path(path, name_or_path)
    if revision is not None:
        raise ModelLoadError(f"revision {revision!r} needs a hub id (owner/name), which {name_or_path!r} is not")
    if name_or_path in TABLE:
        return _load_entry(TABLE[name_or_path])
    if path.exists():
        return _load_path(path, path.resolve().name if path.is_dir() else path.stem)
    raise ModelLoadError(
        f"no model {name_or_path!r}: neither a built-in name ({', '.join(TABLE)}), nor a Hugging Face folder, "
        "nor a .gguf file, nor a hub id (owner/name or owner/name:Q4_K_M)"
    )


def _load_path(path: Path, name: str) -> LoadedModel:
    if path.is_dir():
        from jaxspec.models.load.hf import load_folder

        return load_folder(path, name)
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path}: only .gguf files can be loaded by file; pass the folder of a Hugging Face model")
    return _with_weights(_read_header(path), path, name)


def _read_header(path: Path) -> Header:
    from jaxspec.models.load.gguf import GGUFFile

    file = GGUFFile(path)
    tokenizer = file.tokenizer()
    return Header(replace(file.config, eos_token_ids=tokenizer.eos_token_ids), tokenizer, file.tensors.tensors)


def _with_weights(header: Header, path: Path, name: str) -> LoadedModel:
    from jaxspec.models.load.gguf import gguf_weights
    from jaxspec.models.load.gguf_tensors import GGUFTensors

    weights = gguf_weights(header.config, GGUFTensors(path, header.tensors), str(path))
    return LoadedModel(header.config, weights, header.tokenizer, name)


def _load_entry(entry: Entry) -> LoadedModel:
    """Load a built-in model. Its header is cached, because parsing it at every start takes too long."""
    path = fetch(entry)
    cached = path.with_suffix(".header.json")
    origin = f"{entry.sha256} {path.stat().st_mtime_ns}"  # of the file that was verified
    if (header := load_header(cached, origin)) is None:
        verify(entry, path, str(path))
        header = _read_header(path)
        try:
            save_header(header, cached, origin)
        except OSError as e:
            log.warning("cannot cache the model's header, the next start reads it again: %s", e)
    return _with_weights(header, path, entry.name)
