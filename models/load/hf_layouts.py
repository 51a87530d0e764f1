"""Names of tensors in Hugging Face checkpoints."""

from __future__ import annotations

from jaxspec.models.load.layout import GATE_UP, QKV, Layout, Rows, by_head

_LAYER = "model.layers.{}."

LLAMA = Layout(
    {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
        "attn_norm": _LAYER + "input_layernorm.weight",
        "mlp_norm": _LAYER + "post_attention_layernorm.weight",
        **{name: f"{_LAYER}self_attn.{name}_proj.weight" for name in "qkvo"},
        **{f"{name}_bias": f"{_LAYER}self_attn.{name}_proj.bias" for name in "qkvo"},
        **{f"{name}_norm": f"{_LAYER}self_attn.{name}_norm.weight" for name in "qk"},
        **{name: f"{_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
        **{f"{name}_bias": f"{_LAYER}mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
    },
    ignored=("rotary_emb.inv_freq",),
)


def _with(**names: str) -> dict[str, str]:
    """Llama's names, and these of a layer instead."""
    return {**LLAMA.names, **{part: _LAYER + name for part, name in names.items()}}


#: Norms after both blocks, as OLMo-2 has them.
NORMED_AFTER = Layout(
    _with(post_attn_norm="post_attention_layernorm.weight", post_mlp_norm="post_feedforward_layernorm.weight")
)
GEMMA = Layout(
    _with(
        post_attn_norm="post_attention_layernorm.weight",
        mlp_norm="pre_feedforward_layernorm.weight",
        post_mlp_norm="post_feedforward_layernorm.weight",
    ),
    plus_one=frozenset(("norm", "attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm", "q_norm", "k_norm")),
)
#: q|k|v and gate|up in one tensor each.
FUSED = Layout(
    _with(
        q="self_attn.qkv_proj.weight", k="self_attn.qkv_proj.weight", v="self_attn.qkv_proj.weight",
        gate="mlp.gate_up_proj.weight", up="mlp.gate_up_proj.weight",
    ),
    rows=dict(zip(("q", "k", "v", "gate", "up"), (*QKV, *GATE_UP), strict=True)),
)  # fmt: skip
MIXTRAL = Layout(
    _with(
        router="block_sparse_moe.gate.weight",
        expert_gate="block_sparse_moe.experts.{}.w1.weight",
        expert_up="block_sparse_moe.experts.{}.w3.weight",
        expert_down="block_sparse_moe.experts.{}.w2.weight",
    )
)
QWEN_MOE = Layout(
    _with(
        router="mlp.gate.weight",
        expert_gate="mlp.experts.{}.gate_proj.weight",
        expert_up="mlp.experts.{}.up_proj.weight",
        expert_down="mlp.experts.{}.down_proj.weight",
    )
)

QWEN_SHARED = Layout(
    {
        **QWEN_MOE.names,
        **{f"shared_{name}": f"{_LAYER}mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")},
        "shared_router": _LAYER + "mlp.shared_expert_gate.weight",
    }
)


def _both(**names: str) -> dict[str, str]:
    """Tensor names of the weight and the bias of each part. -> part or part_bias -> tensor name."""
    weights = {part: f"{name}.weight" for part, name in names.items()}
    return weights | {f"{part}_bias": f"{name}.bias" for part, name in names.items()}


_NEOX = "gpt_neox.layers.{}."
NEOX = Layout(
    {
        "embed": "gpt_neox.embed_in.weight",
        "head": "embed_out.weight",
        **_both(
            norm="gpt_neox.final_layer_norm", attn_norm=_NEOX + "input_layernorm",
            mlp_norm=_NEOX + "post_attention_layernorm", up=_NEOX + "mlp.dense_h_to_4h",
            q=_NEOX + "attention.query_key_value", k=_NEOX + "attention.query_key_value",
            v=_NEOX + "attention.query_key_value", o=_NEOX + "attention.dense", down=_NEOX + "mlp.dense_4h_to_h",
        ),
    },
    rows={f"{part}{end}": by_head(i) for i, part in enumerate("qkv") for end in ("", "_bias")},
    ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
)  # fmt: skip
_GPT2 = "transformer.h.{}."
GPT2 = Layout(
    {
        "embed": "transformer.wte.weight",
        "positions": "transformer.wpe.weight",
        "head": "lm_head.weight",
        **_both(
            norm="transformer.ln_f", attn_norm=_GPT2 + "ln_1", mlp_norm=_GPT2 + "ln_2",
            q=_GPT2 + "attn.c_attn", k=_GPT2 + "attn.c_attn", v=_GPT2 + "attn.c_attn", o=_GPT2 + "attn.c_proj",
            up=_GPT2 + "mlp.c_fc", down=_GPT2 + "mlp.c_proj",
        ),
    },
    rows={f"{part}{end}": rows for part, rows in zip("qkv", QKV, strict=True) for end in ("", "_bias")},
    transposed=frozenset("qkvo") | {"up", "down"},
    prefix="transformer.",
    ignored=("attn.bias", "attn.masked_bias"),
)  # fmt: skip
_OPT = "model.decoder.layers.{}."
OPT = Layout(
    {
        "embed": "model.decoder.embed_tokens.weight",
        "positions": "model.decoder.embed_positions.weight",
        "head": "lm_head.weight",
        **_both(
            norm="model.decoder.final_layer_norm", attn_norm=_OPT + "self_attn_layer_norm",
            mlp_norm=_OPT + "final_layer_norm", q=_OPT + "self_attn.q_proj", k=_OPT + "self_attn.k_proj",
            v=_OPT + "self_attn.v_proj", o=_OPT + "self_attn.out_proj", up=_OPT + "fc1", down=_OPT + "fc2",
        ),
    },
    # Positions begin at 2.
    rows={"positions": lambda c: Rows(slice(2, None), c.max_position + 2)},
    prefix="model.",
)  # fmt: skip
