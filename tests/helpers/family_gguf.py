"""GGUF files of the recorded models, with names and rows as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from helpers.checkpoints import add_fields, byte_vocabulary, finish
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load import LoadedModel
from jaxspec.models.load.gguf_families import ARCHITECTURES
from jaxspec.models.load.parts import fused_parts, part_shapes

#: `model_type` of Hugging Face -> `general.architecture`, and what the header says of the parts.
FAMILIES: dict[str, str] = {
    "llama": "llama", "mixtral": "llama", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "olmo2": "olmo2",
    "smollm3": "smollm3", "granite": "granite", "gpt2": "gpt2", "gpt_neox": "gptneox", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}  # fmt: skip


def split(model: LoadedModel) -> dict[str, np.ndarray]:
    """The parts of a loaded model's fused weights, `[out, in]` or `[out]`, by part and layer: `q 0`. Experts are
    stacked."""
    c, shapes = model.config, part_shapes(model.config)
    out = {f"{name} 0": np.asarray(w, np.float32).T if name == "head" else np.asarray(w, np.float32)
           for name, w in model.weights.items() if "." not in name}  # fmt: skip
    for i in range(c.num_layers):
        for name, parts in fused_parts(c).items():
            weight = np.asarray(model.weights[f"layers.{i}.{name}"], np.float32)
            begin = 0
            for part in parts:
                size = shapes[part][0]
                piece = weight[..., begin : begin + size]
                out[f"{part} {i}"] = np.ascontiguousarray(piece.swapaxes(-1, -2) if piece.ndim > 1 else piece)
                begin += size
    return out


def header(c: DecoderConfig, arch: str) -> dict[str, Any]:
    """The header's fields that are the configuration's."""
    eps = "attention.layer_norm_epsilon" if c.norm == "layer" else "attention.layer_norm_rms_epsilon"
    fields: dict[str, Any] = {
        "context_length": c.max_position, "embedding_length": c.hidden_size, "block_count": c.num_layers,
        "feed_forward_length": c.intermediate_size, "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads, "attention.key_length": c.head_dim, "rope.freq_base": c.rope_theta,
        "rope.dimension_count": c.rotated, eps: c.norm_eps,
    }  # fmt: skip
    if c.sliding_window is not None:
        fields["attention.sliding_window"] = c.sliding_window
    if c.experts is not None:
        fields |= {
            "expert_count": c.experts.count, "expert_used_count": c.experts.chosen,
            "expert_feed_forward_length": c.experts.width, "expert_shared_feed_forward_length": c.experts.shared_width,
        }  # fmt: skip
    if c.attention_softcap is not None:
        fields["attn_logit_softcapping"] = c.attention_softcap
    if c.logit_softcap is not None:
        fields["final_logit_softcapping"] = c.logit_softcap
    if (s := c.rope_scaling) is not None:
        fields |= {"rope.scaling.type": s.kind, "rope.scaling.factor": s.factor,
                   "rope.scaling.original_context_length": s.original_max_position}  # fmt: skip
        if s.kind == "longrope":
            fields |= {"rope.scaling.attn_factor": s.attention_factor}
    if arch == "granite":
        fields |= {"attention.scale": c.attention_scale, "embedding_scale": c.embedding_scale,
                   "residual_scale": c.residual_scale, "logit_scale": 1 / c.logit_scale}  # fmt: skip
    if arch == "gptneox":
        fields["use_parallel_residual"] = c.parallel_residual
    return {f"{arch}.{key}": value for key, value in fields.items()}


def write(path: Path, model: LoadedModel, **more: Any) -> Path:
    """Write the model as float32. `more`: fields of the header besides the configuration's."""
    c, arch = model.config, FAMILIES[model.config.family]
    layout, parts = ARCHITECTURES[arch].layout, split(model)
    tensors: dict[str, np.ndarray] = {}
    for key, value in parts.items():
        part, layer = key.split()
        name, rows = layout.name(part, int(layer)), layout.rows_of(part, c)
        if rows is None:
            tensors[name] = value[0] if part in layout.flat else value
            continue
        whole = tensors.setdefault(name, np.zeros((rows.total, *value.shape[1:]), np.float32))
        whole[rows.places] = value
    if (s := c.rope_scaling) is not None and s.kind == "longrope":
        tensors |= {
            f"rope_factors_{kind}.weight": np.asarray(getattr(s, kind), np.float32) for kind in ("short", "long")
        }
    writer = gguf.GGUFWriter(path, arch)
    add_fields(writer, {**header(c, arch), **byte_vocabulary(), **more})
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    finish(writer)
    return path
