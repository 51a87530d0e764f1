"""Names and rows of tensors in GGUF files."""

from __future__ import annotations

from dataclasses import replace

from jaxspec.models.load.layout import GATE_UP, QKV, Layout, halves

_LAYER = "blk.{}."
_PARTS = {
    "attn_norm": "attn_norm", "post_attn_norm": "post_attention_norm", "mlp_norm": "ffn_norm",
    "post_mlp_norm": "post_ffw_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
    "router": "ffn_gate_inp", "expert_gate": "ffn_gate_exps", "expert_up": "ffn_up_exps",
    "expert_down": "ffn_down_exps", "shared_gate": "ffn_gate_shexp", "shared_up": "ffn_up_shexp",
    "shared_down": "ffn_down_shexp", "shared_router": "ffn_gate_inp_shexp",
}  # fmt: skip


def _both(part: str, name: str) -> dict[str, str]:
    return {part: f"{name}.weight", f"{part}_bias": f"{name}.bias"}


_NAMES: dict[str, str] = {
    "embed": "token_embd.weight", "positions": "position_embd.weight", "head": "output.weight",
    **_both("norm", "output_norm"),
}  # fmt: skip
for _part, _name in _PARTS.items():
    _NAMES |= _both(_part, _LAYER + _name)

#: Rows as in Hugging Face checkpoints.
PLAIN = Layout(_NAMES)
SHARED = replace(PLAIN, flat=frozenset(("shared_router",)))
#: With queries and keys in llama.cpp's rotary order.
_Q, _K = halves(lambda c: c.num_heads), halves(lambda c: c.num_kv_heads)
INTERLEAVED = replace(PLAIN, rows={"q": _Q, "k": _K, "q_bias": _Q, "k_bias": _K})
#: q|k|v in one tensor.
_ROWS = {f"{part}{end}": rows for part, rows in zip("qkv", QKV, strict=True) for end in ("", "_bias")}
_JOINT = {part: f"{_LAYER}attn_qkv.weight" for part in "qkv"} | {f"{p}_bias": f"{_LAYER}attn_qkv.bias" for p in "qkv"}
FUSED_QKV = replace(PLAIN, names={**PLAIN.names, **_JOINT}, rows=_ROWS)
#: And gate|up.
FUSED = replace(
    FUSED_QKV,
    names={**FUSED_QKV.names, "gate": PLAIN.names["up"]},
    rows={**_ROWS, "gate": GATE_UP[0], "up": GATE_UP[1]},
)
