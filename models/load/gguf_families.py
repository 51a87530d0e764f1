"""The families of models in GGUF files: a row for each `general.architecture`.

A row says what llama.cpp knows of the architecture without being told by the file. OPT has no GGUF form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxspec.models.load import gguf_layouts as layouts
from jaxspec.models.load.layout import Layout

#: (setting without the architecture's name, default) -> its value in the file's header
Get = Callable[..., Any]


@dataclass(frozen=True)
class Architecture:
    """A `general.architecture`.

    parts: fields of `DecoderConfig` that it fixes; functions read them from the header.
    without: settings of other models with the same name, which are not supported.
    experts_normalised: `Experts.normalised`.
    """

    layout: Layout = layouts.PLAIN
    parts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    without: tuple[str, ...] = ()
    experts_normalised: bool = True


def _windowed(every: int) -> Callable[[Get], tuple[int, ...]]:
    """All layers but each `every`-th, unless the header says otherwise."""

    def layers(get: Get) -> tuple[int, ...]:
        period, count = get("attention.sliding_window_pattern", every), get("block_count")
        return tuple(i for i in range(count) if (i + 1) % period)

    return layers


def _scale(largest: int) -> Callable[[Get], float]:
    """Gemma's scale of attention scores; in the model with `largest` layers it does not follow from the head size."""

    def scale(get: Get) -> float:
        heads, hidden = get("attention.head_count"), get("embedding_length")
        plain = get("attention.key_length") or hidden // heads
        return (hidden // heads if get("block_count") == largest else plain) ** -0.5

    return scale


def _gemma(largest: int, every: int) -> dict[str, Any]:
    return {
        "norm_place": "both", "activation": "gelu_tanh", "embedding_scale": lambda get: get("embedding_length") ** 0.5,
        "attention_scale": _scale(largest), "windowed_layers": _windowed(every),
    }  # fmt: skip


_PLAIN_MLP: dict[str, Any] = {
    "norm": "layer", "gated": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True,
}  # fmt: skip

#: Mistral and Mixtral models are "llama".
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(layouts.INTERLEAVED),
    "qwen2": Architecture(),
    "qwen2moe": Architecture(layouts.SHARED, experts_normalised=False),
    "qwen3": Architecture(parts={"qk_norm": "head"}),
    "qwen3moe": Architecture(parts={"qk_norm": "head"}),
    "gemma2": Architecture(
        parts=_gemma(46, 2) | {
            "attention_softcap": lambda get: get("attn_logit_softcapping", 50.0),
            "logit_softcap": lambda get: get("final_logit_softcapping", 30.0),
        },
    ),
    "gemma3": Architecture(
        parts=_gemma(62, 6) | {
            "qk_norm": "head", "local_rope_theta": lambda get: float(get("rope.freq_base_swa", 10000.0)),
            "logit_softcap": lambda get: get("final_logit_softcapping"),
        },
    ),
    "phi3": Architecture(layouts.FUSED),
    # OLMo-3's files have this name too, and windows with rotary embeddings of their own.
    "olmo2": Architecture(parts={"norm_place": "after", "qk_norm": "all"}, without=("attention.sliding_window",)),
    "smollm3": Architecture(
        layouts.INTERLEAVED, {"unrotated_layers": lambda get: tuple(range(3, get("block_count"), 4))}
    ),
    "granite": Architecture(
        layouts.INTERLEAVED,
        {
            "attention_scale": lambda get: get("attention.scale"),
            "embedding_scale": lambda get: get("embedding_scale", 1.0),
            "residual_scale": lambda get: get("residual_scale", 1.0),
            "logit_scale": lambda get: 1 / get("logit_scale", 1.0),
        },
    ),
    "gpt2": Architecture(layouts.FUSED_QKV, _PLAIN_MLP | {"positions": "learned", "activation": "gelu_tanh"}),
    "gptneox": Architecture(
        layouts.FUSED_QKV,
        _PLAIN_MLP | {"activation": "gelu", "parallel_residual": lambda get: bool(get("use_parallel_residual", True))},
    ),
}  # fmt: skip
