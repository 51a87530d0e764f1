"""Reads GGUF files: header, configuration, tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig, Experts, RopeScaling, longrope_attention
from jaxspec.models.load.files import blaming
from jaxspec.models.load.gguf_families import ARCHITECTURES
from jaxspec.models.load.gguf_layouts import INTERLEAVED
from jaxspec.models.load.gguf_tensors import GGUFTensors, TensorInfo
from jaxspec.models.load.gguf_tokenizer import gguf_tokenizer
from jaxspec.models.load.tokenizer import Tokenizer
from jaxspec.models.load.weights import MAX_LAYERS, LazyWeights, check_tensors, lazy_weights
from jaxspec.models.rotary import inverse_frequencies

#: Divisors of the rotary frequencies: not weights, converted to `RopeScaling`.
_ROPE_FREQS, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"


#: Most entries of an array in a header, each of which the library makes an object for. Vocabularies have 300,000.
_MAX_ENTRIES = 4_000_000


class _Reader(gguf.GGUFReader):
    """Holds the file as a plain array: it is sliced once per vocabulary entry, and slicing a memmap is several times
    slower. Raises `ValueError` for numbers of a header that lead out of the file, which the library follows without
    end."""

    @property
    def data(self) -> np.ndarray:
        return self._view

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._view = np.asarray(mapped)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        if offset + int(count) * np.dtype(dtype).itemsize > len(self._view):
            raise ValueError("the file ends too early")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        array = raw_type == gguf.GGUFValueType.ARRAY
        if array and (entries := int(self._get(orig_offs + 4, np.uint64)[0])) > _MAX_ENTRIES:
            raise ValueError(f"an array of {entries:,} entries")
        return super()._get_field_parts(orig_offs, raw_type)


class GGUFFile:
    """A memory-mapped GGUF file. Raises `ModelLoadError` if it is not GGUF or is truncated."""

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = _Reader(path)
            self.tensors = GGUFTensors(path, {t.name: TensorInfo.of(t) for t in reader.tensors})
        except Exception as e:  # a broken file makes numpy raise various types
            raise ModelLoadError(f"{path}: not a readable GGUF file ({e!s:.300}); is it complete?") from e
        with blaming(str(path), "the header is damaged"):
            self.fields: dict[str, Any] = {key: f.contents() for key, f in reader.fields.items()}

    @cached_property
    def config(self) -> DecoderConfig:
        with blaming(str(self.path), "a field of the header is of a wrong type"):
            return _config(self)

    def tokenizer(self) -> Tokenizer:
        return gguf_tokenizer(self.fields, str(self.path))

    def weights(self) -> LazyWeights:
        return gguf_weights(self.config, self.tensors, str(self.path))


def gguf_weights(config: DecoderConfig, tensors: GGUFTensors, where: str) -> LazyWeights:
    """The weights of a file with this configuration. Raises `ModelLoadError` unless all tensors fit it."""
    layout = ARCHITECTURES[config.family].layout
    check_tensors(config, tensors, layout, ignored=(_ROPE_FREQS, _SHORT, _LONG), where=where)
    return lazy_weights(config, tensors, layout)


def _config(file: GGUFFile) -> DecoderConfig:
    fields, where = file.fields, str(file.path)
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        what = f"architecture {arch!r}" if arch else "a file that names no general.architecture"
        raise ModelLoadError(f"{where}: {what} is not supported; {', '.join(ARCHITECTURES)} are")
    if fields.get("split.count", 1) > 1:
        raise ModelLoadError(f"{where}: one part of a split model; join the parts with llama.cpp's llama-gguf-split")

    def get(key: str, default: Any = None) -> Any:
        value = fields.get(f"{arch}.{key}", default)
        if isinstance(value, list):  # one value per layer
            if len(set(value)) != 1:
                raise ModelLoadError(f"{where}: {arch}.{key} differs from layer to layer, which is not supported")
            value = value[0]
        return value

    def need(key: str) -> Any:
        if (value := get(key)) is None:
            raise ModelLoadError(f"{where}: {arch}.{key} is missing from the header")
        return value

    if "token_embd.weight" not in file.tensors.shapes:
        raise ModelLoadError(f"{where}: tensor token_embd.weight missing; is the download complete?")
    shapes, family = file.tensors.shapes, ARCHITECTURES[arch]
    heads, hidden = need("attention.head_count"), need("embedding_length")
    if not 0 < need("block_count") <= MAX_LAYERS:
        raise ModelLoadError(
            f"{where}: {arch}.block_count must be between 1 and {MAX_LAYERS}, not {get('block_count')}"
        )
    head_dim = get("attention.key_length") or hidden // heads
    rotated = get("rope.dimension_count", head_dim)
    unsupported = [key for key in family.without if get(key)]
    if rotated != head_dim and family.layout is INTERLEAVED:
        unsupported.append(f"rope.dimension_count {rotated} of {head_dim}")
    if get("attention.value_length", head_dim) != head_dim:
        unsupported.append("attention.value_length other than that of keys")
    if unsupported:
        raise ModelLoadError(f"{where}: {arch}.{unsupported[0]} is not supported")
    eps = get("attention.layer_norm_rms_epsilon", get("attention.layer_norm_epsilon"))
    if eps is None:
        raise ModelLoadError(f"{where}: {arch}.attention.layer_norm_rms_epsilon and layer_norm_epsilon are missing")
    tokens = fields.get("tokenizer.ggml.eos_token_id"), fields.get("tokenizer.ggml.bos_token_id")
    given: dict[str, Any] = dict(
        family=arch,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        num_layers=need("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv") or heads,
        head_dim=head_dim,
        max_position=need("context_length"),
        rope_theta=_shortest(get("rope.freq_base", 10000.0)),
        rotary_dim=None if rotated == head_dim else rotated,
        norm_eps=_shortest(eps),
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm="head" if "blk.0.attn_q_norm.weight" in shapes else None,
        sliding_window=get("attention.sliding_window") or None,
        eos_token_ids=() if tokens[0] is None else (tokens[0],),
        bos_token_id=tokens[1],
    )
    given["experts"] = _experts(f"{where}: {arch}", family.experts_normalised, get, need)
    fixed = {key: value(get) if callable(value) else value for key, value in family.parts.items()}
    given |= {key: _shortest(value) if isinstance(value, float) else value for key, value in fixed.items()}
    if given.get("positions") == "learned":
        given |= {"rotary_dim": None}
    config = DecoderConfig(**given)
    return replace(config, rope_scaling=_rope_scaling(file, config, get))


def _experts(where: str, normalised: bool, get: Callable[..., Any], need: Callable[[str], Any]) -> Experts | None:
    if not (count := get("expert_count", 0)):
        return None
    if not 0 < need("expert_used_count") <= count:
        raise ModelLoadError(f"{where}.expert_used_count must be between 1 and expert_count ({count})")
    width = get("expert_feed_forward_length") or need("feed_forward_length")
    return Experts(count, need("expert_used_count"), width, normalised, get("expert_shared_feed_forward_length", 0))


def _rope_scaling(file: GGUFFile, config: DecoderConfig, get: Callable[..., Any]) -> RopeScaling | None:
    """Linear scaling and YaRN from the header, those of Llama 3 and LongRoPE from tensors of frequency divisors."""
    kind = get("rope.scaling.type", "none")
    factor = _shortest(get("rope.scaling.factor", get("rope.scale_linear", 1.0)))
    original = get("rope.scaling.original_context_length", config.max_position)
    if _LONG in file.tensors.shapes and _SHORT in file.tensors.shapes:
        return _longrope(file, config, original, get("rope.scaling.attn_factor"))
    if kind == "yarn":
        # llama.cpp scales by this and by a factor given.
        attention = (0.1 * log(factor) + 1.0 if factor > 1 else 1.0) * get("rope.scaling.attn_factor", 1.0)
        fast, slow = get("rope.scaling.yarn_beta_fast", 32.0), get("rope.scaling.yarn_beta_slow", 1.0)
        return RopeScaling(
            "yarn", factor, original_max_position=original, beta_fast=fast, beta_slow=slow, attention_factor=attention
        )
    if kind not in ("none", "linear"):
        raise ModelLoadError(f"{file.path}: rope scaling {kind!r} is not supported; linear, llama3, yarn, longrope are")
    if _ROPE_FREQS not in file.tensors.shapes:
        return RopeScaling("linear", factor) if factor != 1.0 and kind == "linear" else None
    return _llama3_scaling(config, file.tensors.read(_ROPE_FREQS), str(file.path))


def _longrope(file: GGUFFile, config: DecoderConfig, original: int, attention: float | None) -> RopeScaling:
    if attention is None:
        attention = longrope_attention(config.max_position / original, original)
    short, long = (tuple(map(_shortest, file.tensors.read(name).tolist())) for name in (_SHORT, _LONG))
    if not len(short) == len(long) == config.rotated // 2:
        raise ModelLoadError(f"{file.path}: {_SHORT} and {_LONG} must have {config.rotated // 2} numbers each")
    return RopeScaling(
        "longrope", original_max_position=original, attention_factor=float(attention), short=short, long=long
    )


def _llama3_scaling(config: DecoderConfig, divisors: np.ndarray, where: str) -> RopeScaling | None:
    """Find the Llama 3.1 scaling that yields `divisors [head_dim / 2]`, trying power-of-two context lengths.

    Returns None if all divisors are 1. Raises `ModelLoadError` if none fits.
    """
    if np.allclose(divisors, 1.0):
        return None
    plain = inverse_frequencies(config)
    for context in (2**n for n in range(11, 21)):
        scaling = RopeScaling("llama3", _shortest(divisors.max()), original_max_position=context)
        if np.allclose(plain / inverse_frequencies(replace(config, rope_scaling=scaling)), divisors, rtol=1e-4):
            return scaling
    raise ModelLoadError(f"{where}: {_ROPE_FREQS} doesn't follow the llama3 rule, and no other is supported")


def _shortest(value: float) -> float:
    """Shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
