"""Maps a checkpoint's tensors to the engine's weights: fused, float32, matrices `[in, out]`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig

Weights = dict[str, np.ndarray]


class TensorSource(Protocol):
    """The tensors of a checkpoint as stored, matrices `[out, in]`."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name -> shape."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Read a tensor as float32."""
        ...


#: Part -> tensor name in the checkpoint; `{}` is the layer.
HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
GGUF_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "o": "blk.{}.attn_output.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Part -> shape as stored in a checkpoint (`[out, in]`), for all parts of this configuration."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (c.vocab_size, c.hidden_size),
        "norm": (c.hidden_size,),
        "attn_norm": (c.hidden_size,),
        "mlp_norm": (c.hidden_size,),
        "q": (c.q_size, c.hidden_size),
        "k": (c.kv_size, c.hidden_size),
        "v": (c.kv_size, c.hidden_size),
        "o": (c.hidden_size, c.q_size),
        "gate": (c.intermediate_size, c.hidden_size),
        "up": (c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
    }
    if not c.tie_embeddings:
        shapes["head"] = (c.vocab_size, c.hidden_size)
    if c.qkv_bias:
        shapes |= {"q_bias": (c.q_size,), "k_bias": (c.kv_size,), "v_bias": (c.kv_size,)}
    if c.qk_norm:
        shapes |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    return shapes


def check_tensors(
    config: DecoderConfig, source: TensorSource, names: Mapping[str, str], ignored: Iterable[str], where: str
) -> None:
    """Raise `ModelLoadError` naming tensors that are missing, unexpected or of the wrong shape."""
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelLoadError(
            f"{where}: {config.num_heads} heads of {config.head_dim} don't fit {config.num_kv_heads} key-value heads"
        )
    shapes = expected_shapes(config)
    wanted = {
        names[part].format(layer): shape
        for part, shape in shapes.items()
        for layer in (range(config.num_layers) if "{}" in names[part] else (0,))
    }
    if missing := sorted(wanted.keys() - source.shapes.keys()):
        raise ModelLoadError(f"{where}: {_listed(missing)} missing; is the download complete?")
    if extra := sorted(source.shapes.keys() - wanted.keys() - set(ignored)):
        raise ModelLoadError(
            f"{where}: unexpected {_listed(extra)}; the configuration describes a {config.family} decoder without it"
        )
    for name, shape in wanted.items():
        if source.shapes[name] != shape:
            raise ModelLoadError(
                f"{where}: tensor {name} has shape {list(source.shapes[name])}, the configuration says {list(shape)}"
            )


def assemble(
    config: DecoderConfig, source: TensorSource, names: Mapping[str, str], interleaved: bool = False
) -> Weights:
    """Read and fuse all weights. `interleaved`: q and k rows are in llama.cpp's rotary order."""

    def read(part: str, layer: int = 0) -> np.ndarray:
        tensor = source.read(names[part].format(layer))
        if interleaved and part in ("q", "k", "q_bias", "k_bias"):
            tensor = split_halves(tensor, config.head_dim)
        return tensor

    def matrix(*parts: str, layer: int = 0) -> np.ndarray:
        return np.ascontiguousarray(np.concatenate([read(p, layer) for p in parts]).T)

    out: Weights = {"embed": np.ascontiguousarray(read("embed")), "norm": read("norm")}
    if not config.tie_embeddings:
        out["head"] = matrix("head")
    for i in range(config.num_layers):
        at = f"layers.{i}."
        out[at + "attn_norm"] = read("attn_norm", i)
        out[at + "qkv"] = matrix("q", "k", "v", layer=i)
        if config.qkv_bias:
            out[at + "qkv_bias"] = np.concatenate([read(p, i) for p in ("q_bias", "k_bias", "v_bias")])
        if config.qk_norm:
            out[at + "q_norm"], out[at + "k_norm"] = read("q_norm", i), read("k_norm", i)
        out[at + "o"] = matrix("o", layer=i)
        out[at + "mlp_norm"] = read("mlp_norm", i)
        out[at + "gate_up"] = matrix("gate", "up", layer=i)
        out[at + "down"] = matrix("down", layer=i)
    return out


def split_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Convert rows `[heads * head_dim, …]` from llama.cpp's order, where rotary pairs are adjacent, to split halves."""
    paired = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return (
        f"tensor {shown}"
        if len(names) == 1
        else f"tensors {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    )
