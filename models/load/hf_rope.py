"""Rotary settings of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from typing import Any

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import RopeScaling, longrope_attention

#: Layers of a kind, where rotary parameters differ between kinds.
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def rotary(c: Mapping[str, Any], head_dim: int, where: str) -> dict[str, Any]:
    """The fields of `DecoderConfig` on rotary embeddings, from `rope_parameters` or the older `rope_theta` and
    `rope_scaling`. Raises `ModelLoadError` naming what is not supported."""
    rope: dict[str, Any] = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    local = c.get("rope_local_base_freq")
    if any(isinstance(value, dict) for value in rope.values()):
        if {*rope} - {_GLOBAL, _LOCAL}:
            raise ModelLoadError(f"{where}: rotary parameters of {', '.join(sorted(rope))} are not supported")
        in_window = rope.get(_LOCAL) or {}
        if in_window.get("rope_type", "default") != "default":
            raise ModelLoadError(f"{where}: scaled rotary embeddings of layers with a sliding window are not supported")
        local, rope = in_window.get("rope_theta", local), rope.get(_GLOBAL) or {}
    theta = float(rope.get("rope_theta", c.get("rope_theta", 10000.0)))
    share = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _scaling(rope, c, int(head_dim * share), where)}
    if share != 1.0:
        fields["rotary_dim"] = int(head_dim * share)
    if local is not None:
        fields["local_rope_theta"] = float(local)
    return fields


def _scaling(rope: Mapping[str, Any], c: Mapping[str, Any], rotated: int, where: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))

    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key, default)
        if not isinstance(value, int | float) or value <= 0:
            raise ModelLoadError(f"{where}: rope scaling {kind!r} needs a positive {key}, not {value!r}")
        return float(value)

    match kind:
        case "default":
            return None
        case "linear":
            return RopeScaling("linear", number("factor"))
        case "llama3":
            return RopeScaling(
                "llama3",
                factor=number("factor"),
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
                original_max_position=int(number("original_max_position_embeddings")),
            )
        case "yarn":
            return _yarn(rope, c, number)
        case "longrope" | "su":
            return _longrope(rope, c, rotated, where)
    raise ModelLoadError(f"{where}: rope scaling {kind!r} is not supported; linear, llama3, yarn and longrope are")


def _yarn(rope: Mapping[str, Any], c: Mapping[str, Any], number: Callable[..., float]) -> RopeScaling:
    """Attention factor as in transformers: given, or by DeepSeek's two `mscale`, or 0.1 ln(factor) + 1."""
    factor = number("factor")

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * log(factor) + 1

    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    attention = scale(above) / scale(below) if above and below else scale(1.0)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_position=int(number("original_max_position_embeddings", c["max_position_embeddings"])),
        beta_fast=number("beta_fast", 32),
        beta_slow=number("beta_slow", 1),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=number("attention_factor", attention),
    )


def _longrope(rope: Mapping[str, Any], c: Mapping[str, Any], rotated: int, where: str) -> RopeScaling:
    original = c.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if not isinstance(original, int) or original < 1:
        raise ModelLoadError(
            f"{where}: rope scaling 'longrope' needs original_max_position_embeddings, not {original!r}"
        )
    divisors = {}
    for name in ("short_factor", "long_factor"):
        values = rope.get(name)
        if not isinstance(values, list) or len(values) != rotated // 2 or not all(v > 0 for v in values):
            raise ModelLoadError(f"{where}: rope scaling 'longrope' needs {rotated // 2} positive numbers in {name}")
        divisors[name] = tuple(float(value) for value in values)
    factor = rope.get("factor") or c["max_position_embeddings"] / original
    return RopeScaling(
        "longrope",
        original_max_position=original,
        attention_factor=float(rope.get("attention_factor") or longrope_attention(factor, original)),
        short=divisors["short_factor"],
        long=divisors["long_factor"],
    )
