"""The parts that a model's configuration implies: their shapes in a checkpoint, and how they are fused."""

from __future__ import annotations

from jaxspec.models.config import DecoderConfig

Shapes = dict[str, tuple[int, ...]]

#: Parts that a model has once; the others are a layer's.
ONCE = ("embed", "positions", "norm", "norm_bias", "head")
#: The parts of a layer that are matrices; the others are vectors. Those of `EXPERTS` are a matrix for each expert.
MATRICES = ("qkv", "o", "gate_up", "down", "router", "shared_gate_up", "shared_down", "shared_router")
EXPERTS = ("experts_gate_up", "experts_down")
#: Weight of a layer -> the parts that are fused into it, those that the configuration has.
_FUSED = {
    "attn_norm": ("attn_norm",),
    "attn_norm_bias": ("attn_norm_bias",),
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "q_norm": ("q_norm",),
    "k_norm": ("k_norm",),
    "o": ("o",),
    "o_bias": ("o_bias",),
    "post_attn_norm": ("post_attn_norm",),
    "mlp_norm": ("mlp_norm",),
    "mlp_norm_bias": ("mlp_norm_bias",),
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
    "down": ("down",),
    "down_bias": ("down_bias",),
    "router": ("router",),
    "experts_gate_up": ("expert_gate", "expert_up"),
    "experts_down": ("expert_down",),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "shared_down": ("shared_down",),
    "shared_router": ("shared_router",),
    "post_mlp_norm": ("post_mlp_norm",),
}


def part_shapes(config: DecoderConfig) -> Shapes:
    """Part -> shape as stored in a checkpoint (`[out, in]`), for all parts of this configuration; of an expert's parts
    the shape of one expert's."""
    c, hidden = config, config.hidden_size
    shapes: Shapes = {"embed": (c.vocab_size, hidden)}
    if c.positions == "learned":
        shapes["positions"] = (c.max_position, hidden)
    norms = ["norm"]
    norms += ["attn_norm", "mlp_norm"] if c.norm_place != "after" else []
    norms += ["post_attn_norm", "post_mlp_norm"] if c.norm_place != "before" else []
    for name in norms:
        shapes[name] = (hidden,)
        if c.norm == "layer":
            shapes[f"{name}_bias"] = (hidden,)
    shapes |= {"q": (c.q_size, hidden), "k": (c.kv_size, hidden), "v": (c.kv_size, hidden), "o": (hidden, c.q_size)}
    if c.qkv_bias:
        shapes |= {"q_bias": (c.q_size,), "k_bias": (c.kv_size,), "v_bias": (c.kv_size,)}
    if c.o_bias:
        shapes["o_bias"] = (hidden,)
    if c.qk_norm is not None:
        whole = c.qk_norm == "all"
        shapes |= {"q_norm": (c.q_size if whole else c.head_dim,), "k_norm": (c.kv_size if whole else c.head_dim,)}
    shapes |= _mlp_shapes(c)
    if not c.tie_embeddings:
        shapes["head"] = (c.vocab_size, hidden)
    return shapes


def _mlp_shapes(c: DecoderConfig) -> Shapes:
    hidden, width = c.hidden_size, c.intermediate_size
    if (e := c.experts) is not None:
        each: Shapes = {"expert_gate": (e.width, hidden), "expert_up": (e.width, hidden)}
        each |= {"router": (e.count, hidden), "expert_down": (hidden, e.width)}
        if e.shared_width:
            each |= {name: (e.shared_width, hidden) for name in ("shared_gate", "shared_up")}
            each |= {"shared_down": (hidden, e.shared_width), "shared_router": (1, hidden)}
        return each
    shapes: Shapes = {"gate": (width, hidden)} if c.gated else {}
    shapes |= {"up": (width, hidden), "down": (hidden, width)}
    if c.mlp_bias:
        shapes |= {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
    return shapes


def fused_parts(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """Weight of a layer -> the parts that are fused into it."""
    shapes = part_shapes(config)
    found = {name: tuple(part for part in parts if part in shapes) for name, parts in _FUSED.items()}
    return {name: parts for name, parts in found.items() if parts}


def layer_shapes(config: DecoderConfig) -> Shapes:
    """Shape of each weight of a layer, matrices `[in, out]`, those of experts `[experts, in, out]`."""
    shapes, count = part_shapes(config), config.experts and config.experts.count
    out: Shapes = {}
    for name, parts in fused_parts(config).items():
        shape = (*shapes[parts[0]][1:], sum(shapes[part][0] for part in parts))
        out[name] = (count, *shape) if count and name in EXPERTS else shape
    return out


def weight_shapes(config: DecoderConfig) -> Shapes:
    """The shape of every weight by its name, as in `jaxspec.models.load`."""
    shapes = part_shapes(config)
    out = {name: shapes[name] if name != "head" else shapes[name][::-1] for name in ONCE if name in shapes}
    for i in range(config.num_layers):
        out |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(config).items()}
    return out
