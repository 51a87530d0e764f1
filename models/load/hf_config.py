"""Converts a Hugging Face `config.json` to a `DecoderConfig`; unsupported settings are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig, RopeScaling

#: `model_type` -> transformers' defaults for keys missing from config.json.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
_WINDOWED = "sliding_attention"


def decoder_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Convert all settings except special token ids. Raises `ModelLoadError` naming an unsupported setting."""
    family = raw.get("model_type")
    if family is None and not raw.get("architectures"):
        named = ", ".join(FAMILIES)
        raise ModelLoadError(f"{where} names no model_type: a model without one is not supported; {named} are")
    if family not in FAMILIES:
        architecture = (raw.get("architectures") or [family])[0]
        raise ModelLoadError(f"{where}: architecture {architecture!r} is not supported; {', '.join(FAMILIES)} are")
    # null means the default, except for sliding_window, where it means no window.
    c: dict[str, Any] = FAMILIES[family] | {
        key: v for key, v in raw.items() if v is not None or key == "sliding_window"
    }

    def number(key: str, default: int | None = None) -> int:
        value = c.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"{where}: {key} must be a positive whole number, not {value!r}")
        return value

    if "quantization_config" in c:
        method = c["quantization_config"].get("quant_method", "an unknown method")
        raise ModelLoadError(
            f"{where}: weights quantised by {method} cannot be read; use the original weights or a .gguf"
        )
    if c.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelLoadError(f"{where}: hidden_act {c['hidden_act']!r} is not supported; silu is")
    if c.get("mlp_bias"):
        raise ModelLoadError(f"{where}: mlp_bias is not supported")
    hidden, heads, layers = number("hidden_size"), number("num_attention_heads"), number("num_hidden_layers")
    theta, scaling = _rope(c, where)
    window, windowed = _window(family, c, layers)
    return DecoderConfig(
        family=family,
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads),
        max_position=number("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(c.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(c.get("tie_word_embeddings", False)),
        # Qwen2 always has these biases and Mistral never does, whatever config.json says.
        qkv_bias=family == "qwen2" or (family != "mistral" and bool(c.get("attention_bias", False))),
        qk_norm=family == "qwen3",
        sliding_window=window,
        windowed_layers=windowed,
    )


def _rope(c: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    rope: dict[str, Any] = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelLoadError(f"{where}: rotary parameters that differ between layers are not supported")
    if rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelLoadError(f"{where}: partial_rotary_factor is not supported")
    theta = float(rope.get("rope_theta", c.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))

    def number(key: str) -> float:
        value = rope.get(key)
        if not isinstance(value, int | float) or value <= 0:
            raise ModelLoadError(f"{where}: rope scaling {kind!r} needs a positive {key}, not {value!r}")
        return float(value)

    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_position=int(number("original_max_position_embeddings")),
        )
    raise ModelLoadError(f"{where}: rope scaling {kind!r} is not supported; linear and llama3 are")


def _window(family: str, c: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window and the layers with it; an empty tuple means all layers."""
    window = c.get("sliding_window")
    if not window or family == "llama":
        return None, ()
    if family == "mistral":
        return int(window), ()
    if not c.get("use_sliding_window", False):
        return None, ()
    first = c.get("max_window_layers", 28)
    kinds = c.get("layer_types") or [_WINDOWED if i >= first else "" for i in range(layers)]
    windowed = tuple(i for i, kind in enumerate(kinds[:layers]) if kind == _WINDOWED)
    if not windowed:
        return None, ()
    return int(window), () if len(windowed) == layers else windowed
