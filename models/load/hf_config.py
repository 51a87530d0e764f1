"""Converts a Hugging Face `config.json` to a `DecoderConfig`; unsupported settings are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.hf_families import FAMILIES, Family
from jaxspec.models.load.hf_rope import rotary
from jaxspec.models.load.weights import MAX_LAYERS

_WINDOWED = "sliding_attention"
#: Settings for which null says that there is none; key-value heads are then as many as heads.
_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "num_key_value_heads")
#: Names of activations in config.json -> `DecoderConfig.activation`.
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}  # fmt: skip


def decoder_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Convert all settings except special token ids. Raises `ModelLoadError` naming an unsupported setting."""
    name = raw.get("model_type")
    if name is None and not raw.get("architectures"):
        named = ", ".join(FAMILIES)
        raise ModelLoadError(f"{where} names no model_type: a model without one is not supported; {named} are")
    if name not in FAMILIES:
        architecture = (raw.get("architectures") or [name])[0]
        raise ModelLoadError(f"{where}: architecture {architecture!r:.100} is not supported; {', '.join(FAMILIES)} are")
    family = FAMILIES[name]
    c = _settings(raw, family)

    def number(key: str, default: int | None = None) -> int:
        value = default if c.get(key) is None else c[key]
        most = MAX_LAYERS if key == "num_hidden_layers" else 2**31 - 1
        if not isinstance(value, int) or not 1 <= value <= most:
            known = next((theirs for theirs, ours in family.renamed.items() if ours == key), key)
            raise ModelLoadError(f"{where}: {known} must be a positive whole number up to {most}, not {value!r:.100}")
        return value

    for key, allowed in family.only.items():
        if c.get(key) not in allowed:
            values = " and ".join(str(value) for value in allowed if value is not None)
            raise ModelLoadError(f"{where}: {key} {c[key]!r:.100} is not supported; {values} is")
    activation = c.get("hidden_activation") or c.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ModelLoadError(f"{where}: hidden_act {activation!r:.100} is not supported; {', '.join(_ACTIVATIONS)} are")
    hidden, heads, layers = number("hidden_size"), number("num_attention_heads"), number("num_hidden_layers")
    head_dim = number("head_dim", hidden // heads)
    window, windowed = _window(family, c, layers)
    fields: dict[str, Any] = dict(
        family=name,
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position=number("max_position_embeddings"),
        norm_eps=float(c.get("rms_norm_eps", 1e-6)),
        activation=_ACTIVATIONS[activation],
        tie_embeddings=bool(c.get("tie_word_embeddings", False)),
        qkv_bias=bool(c.get("attention_bias", False)),
        o_bias=bool(c.get("attention_bias", False)),
        mlp_bias=bool(c.get("mlp_bias", False)),
        sliding_window=window,
        windowed_layers=windowed,
    )
    if family.parts.get("positions") != "learned":
        fields |= rotary(c, head_dim, where)
    if "intermediate_size" not in family.parts:
        fields["intermediate_size"] = number("intermediate_size")
    try:
        fields |= {key: value(c) if callable(value) else value for key, value in family.parts.items()}
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError) as error:
        raise ModelLoadError(f"{where}: a setting of {name} is missing or of a wrong type ({error!s:.200})") from None
    if (embedding := c.get("word_embed_proj_dim", hidden)) != hidden:
        raise ModelLoadError(f"{where}: word_embed_proj_dim {embedding} other than hidden_size is not supported")
    return DecoderConfig(**fields)


def _settings(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The settings by their shared names, with defaults. null means the default, except for `_NONE`."""
    given = {key: value for key, value in raw.items() if value is not None or key in _NONE}
    merged = {**family.defaults, **given}
    return {**merged, **{ours: given[theirs] for theirs, ours in family.renamed.items() if theirs in given}}


def _window(family: Family, c: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window and the layers with it; an empty tuple means all layers."""
    window = c.get("sliding_window")
    if not window or family.windowed is None or not c.get("use_sliding_window", True):
        return None, ()
    kinds = c.get("layer_types")
    there = [kind == _WINDOWED for kind in kinds[:layers]] if kinds else [family.windowed(c, i) for i in range(layers)]
    windowed = tuple(i for i, has in enumerate(there) if has)
    if not windowed:
        return None, ()
    return int(window), () if len(windowed) == layers else windowed
