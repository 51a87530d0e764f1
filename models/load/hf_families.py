"""The families of models in Hugging Face folders: a row each.

A row says what a `config.json` leaves out, which parts the family always has, and where its tensors are. The rest is
read from the settings that all families share (`hf_config.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxspec.models.config import Experts
from jaxspec.models.load import hf_layouts as layouts
from jaxspec.models.load.layout import Layout

#: The settings of a config.json, with defaults.
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A `model_type`.

    defaults: transformers' for settings that are missing in config.json.
    renamed: the family's name of a setting -> the shared one.
    parts: fields of `DecoderConfig` that the family fixes; functions read them from the settings.
    windowed: whether a layer has the sliding window, where `layer_types` does not say; None: no layer has.
    only: settings that must have one of these values.
    """

    layout: Layout = layouts.LLAMA
    defaults: Settings = field(default_factory=dict[str, Any])
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    parts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    windowed: Callable[[Settings, int], bool] | None = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])


def _all(settings: Settings, layer: int) -> bool:
    return True


def _last(settings: Settings, layer: int) -> bool:
    return layer >= settings.get("max_window_layers", 28)


_QWEN: dict[str, Any] = {
    "max_position_embeddings": 32768, "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096,
}  # fmt: skip
_NO_BIAS: dict[str, Any] = {"qkv_bias": False, "o_bias": False}
_BIASES = {"norm": "layer", "qkv_bias": True, "o_bias": True, "mlp_bias": True, "gated": False}
_GEMMA: dict[str, Any] = {
    "norm_place": "both",
    "embedding_scale": lambda c: c["hidden_size"] ** 0.5,
    "attention_scale": lambda c: c["query_pre_attn_scalar"] ** -0.5,
    "attention_softcap": lambda c: c.get("attn_logit_softcapping"),
    "logit_softcap": lambda c: c.get("final_logit_softcapping"),
}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_CAUSAL = {"use_bidirectional_attention": (None, False)}
_ALL_EXPERTS = {"decoder_sparse_step": (1,), "mlp_only_layers": (None, [])}


def _nope(settings: Settings) -> tuple[int, ...]:
    """Layers without rotary embeddings: `no_rope_layers` has a 0 for each."""
    every, count = settings["no_rope_layer_interval"], settings["num_hidden_layers"]
    rotated = settings.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    return tuple(i for i, there in enumerate(rotated) if not there)


FAMILIES: dict[str, Family] = {
    "llama": Family(defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        parts=_NO_BIAS, windowed=_all,
    ),
    # Qwen2 always has these biases, whatever config.json says.
    "qwen2": Family(defaults=_QWEN, parts={"qkv_bias": True, "o_bias": False}, windowed=_last),
    "qwen3": Family(defaults=_QWEN | {"head_dim": 128}, parts={"qk_norm": "head"}, windowed=_last),
    "phi3": Family(
        layouts.FUSED,
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        parts=_NO_BIAS, windowed=_all,
    ),
    "gemma2": Family(
        layouts.GEMMA, _GEMMA_DEFAULTS | {
            "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        parts=_GEMMA, windowed=lambda settings, layer: layer % 2 == 0, only=_CAUSAL,
    ),
    "gemma3_text": Family(
        layouts.GEMMA, _GEMMA_DEFAULTS | {
            "max_position_embeddings": 131072, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
        parts=_GEMMA | {"qk_norm": "head"},
        windowed=lambda settings, layer: (layer + 1) % settings["sliding_window_pattern"] != 0, only=_CAUSAL,
    ),
    "olmo2": Family(
        layouts.NORMED_AFTER, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        parts={"norm_place": "after", "qk_norm": "all"},
    ),
    "smollm3": Family(
        defaults={
            "max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True, "no_rope_layer_interval": 4, "use_sliding_window": False,
        },
        parts={"unrotated_layers": _nope}, windowed=lambda settings, layer: layer in _nope(settings),
    ),
    "granite": Family(
        defaults={
            "max_position_embeddings": 2048, "attention_multiplier": 1.0, "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0, "logits_scaling": 1.0,
        },
        parts={
            "attention_scale": lambda c: float(c["attention_multiplier"]),
            "embedding_scale": lambda c: float(c["embedding_multiplier"]),
            "residual_scale": lambda c: float(c["residual_multiplier"]),
            "logit_scale": lambda c: 1 / c["logits_scaling"],
        },
    ),
    "mixtral": Family(
        layouts.MIXTRAL,
        {
            "max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "num_local_experts": 8,
        },
        parts=_NO_BIAS | {
            "experts": lambda c: Experts(c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"]),
        },
        windowed=_all,
    ),
    "qwen2_moe": Family(
        layouts.QWEN_SHARED,
        _QWEN | {
            "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        renamed={"num_local_experts": "num_experts"},
        parts={
            "qkv_bias": lambda c: bool(c.get("qkv_bias", True)), "o_bias": False,
            "experts": lambda c: Experts(
                c["num_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"], bool(c["norm_topk_prob"]),
                c["shared_expert_intermediate_size"],
            ),
        },
        windowed=_last, only=_ALL_EXPERTS,
    ),
    "qwen3_moe": Family(
        layouts.QWEN_MOE,
        _QWEN | {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
        },
        renamed={"num_local_experts": "num_experts"},
        parts={
            "qk_norm": "head",
            "experts": lambda c: Experts(
                c["num_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"], bool(c["norm_topk_prob"])
            ),
        },
        windowed=_all, only=_ALL_EXPERTS,
    ),
    "gpt_neox": Family(
        layouts.NEOX,
        {
            "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "attention_bias": True,
            "partial_rotary_factor": 0.25, "use_parallel_residual": True,
        },
        renamed={
            "layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta",
        },
        parts=_BIASES | {
            "qkv_bias": lambda c: bool(c["attention_bias"]), "o_bias": lambda c: bool(c["attention_bias"]),
            "parallel_residual": lambda c: bool(c["use_parallel_residual"]),
        },
    ),
    "gpt2": Family(
        layouts.GPT2,
        {
            "hidden_act": "gelu_new", "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True,
            "add_cross_attention": False,
        },
        renamed={
            "n_positions": "max_position_embeddings", "n_embd": "hidden_size", "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads", "n_inner": "intermediate_size", "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        parts=_BIASES | {
            "positions": "learned", "intermediate_size": lambda c: c.get("intermediate_size") or 4 * c["hidden_size"],
            "attention_scale": lambda c: None if c["scale_attn_weights"] else 1.0,
        },
        only={"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    ),
    "opt": Family(
        layouts.OPT,
        {
            "hidden_act": "relu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
            "do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True,
            "enable_bias": True,
        },
        renamed={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
        parts=_BIASES | {"positions": "learned"},
        only={
            "do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,), "enable_bias": (True,),
        },
    ),
}  # fmt: skip
