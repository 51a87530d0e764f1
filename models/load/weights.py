"""Maps a checkpoint's tensors to the engine's weights: fused, matrices `[in, out]`, each read when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.stored import StoredMatrix

#: Weights by name: a dict, or `LazyWeights`.
Weights = Mapping[str, np.ndarray]
#: Reads one weight.
Reader = Callable[[], np.ndarray]
#: The parts of a fused matrix as they are stored.
Stored = Sequence[StoredMatrix]


class LazyWeights(Weights):
    """Weights that are read when they are used: `weights[name]` reads one weight, and nothing keeps it.

    So a model larger than the host's memory can be put on the device weight by weight. Iterating, `len` and `in` read
    nothing; `values()` and `items()` read one weight at a time, `dict(weights)` reads all. Files stay memory-mapped as
    long as this object lives, and must not be changed meanwhile. `stored`: for `stored_parts`, of matrices whose
    stored form differs from the reader's. `of_target`: names of a drafter's weights that are the target's own.
    """

    def __init__(
        self, readers: Mapping[str, Reader], stored: Mapping[str, Stored] | None = None, of_target: Iterable[str] = ()
    ):
        self._readers, self.stored, self.of_target = dict(readers), dict(stored or {}), frozenset(of_target)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:  # Mapping's would read the weight
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def watched(self, read: Callable[[str], None]) -> LazyWeights:
        """The same weights; `read` is told the name of each when it is read the first time, also in its stored form."""
        seen: set[str] = set()

        def reading(name: str, reader: Reader) -> np.ndarray:
            if name not in seen:
                seen.add(name)
                read(name)
            return reader()

        readers = {name: partial(reading, name, reader) for name, reader in self._readers.items()}
        stored = {
            name: [replace(part, read=partial(reading, name, part.read)) for part in parts]
            for name, parts in self.stored.items()
        }
        return LazyWeights(readers, stored)


def readers_of(weights: Weights) -> dict[str, Reader]:
    """A reader of each weight, from which to make other `LazyWeights`."""
    return {name: partial(weights.__getitem__, name) for name in weights}


def stored_of(weights: Weights) -> dict[str, Stored]:
    """`LazyWeights.stored` of any weights."""
    return weights.stored if isinstance(weights, LazyWeights) else {}


def of_target(weights: Weights) -> frozenset[str]:
    """`LazyWeights.of_target` of any weights."""
    return weights.of_target if isinstance(weights, LazyWeights) else frozenset()


def stored_parts(weights: Weights, name: str, shape: tuple[int, int]) -> Stored:
    """A matrix in its stored form, as parts `[out, in]` to be fused along `out`; `shape` is `(out, in)`.

    The embedding is `[vocab, hidden]`. Where only the weight itself is known, that is one part, read when it is used.
    """
    if parts := stored_of(weights).get(name):
        return parts

    def read() -> np.ndarray:
        matrix = np.asarray(weights[name])
        return matrix if name == "embed" else matrix.T

    return [StoredMatrix.read_by(read, shape)]


class TensorSource(Protocol):
    """The tensors of a checkpoint as stored, matrices `[out, in]`."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name -> shape."""
        ...

    def check(self, name: str) -> None:
        """Raise `ModelLoadError` unless `read` supports the tensor's type. Does not read the tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Read a tensor in its stored dtype; float64 and quantised tensors as float32."""
        ...

    def matrix(self, name: str) -> StoredMatrix:
        """A tensor of two axes in its stored form."""
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


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight by its name, fused as in `jaxspec.models.load`."""
    c = config
    both = c.q_size + 2 * c.kv_size
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.hidden_size,), "mlp_norm": (c.hidden_size,), "qkv": (c.hidden_size, both),
        "o": (c.q_size, c.hidden_size), "gate_up": (c.hidden_size, 2 * c.intermediate_size),
        "down": (c.intermediate_size, c.hidden_size),
    }  # fmt: skip
    if c.qkv_bias:
        layer["qkv_bias"] = (both,)
    if c.qk_norm:
        layer |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    out: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, c.hidden_size), "norm": (c.hidden_size,)}
    for i in range(c.num_layers):
        out |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if not c.tie_embeddings:
        out["head"] = (c.hidden_size, c.vocab_size)
    return out


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
    """Raise `ModelLoadError` naming tensors that are missing, unexpected, or of the wrong shape or type.

    Reads no tensor.
    """
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
        source.check(name)


#: The parts of a layer that are matrices; the others are vectors.
MATRICES = ("qkv", "o", "gate_up", "down")
#: Weight of a layer -> the parts that are fused into it.
_FUSED = {
    "attn_norm": ("attn_norm",),
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "q_norm": ("q_norm",),
    "k_norm": ("k_norm",),
    "o": ("o",),
    "mlp_norm": ("mlp_norm",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}


def layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each weight of a layer, matrices `[in, out]`."""
    shapes = expected_shapes(config)
    fused = {name: parts for name, parts in _FUSED.items() if parts[0] in shapes}
    return {name: (*shapes[parts[0]][1:], sum(shapes[p][0] for p in parts)) for name, parts in fused.items()}


def lazy_weights(
    config: DecoderConfig, source: TensorSource, names: Mapping[str, str], interleaved: bool = False
) -> LazyWeights:
    """The fused weights of a checkpoint that passed `check_tensors`.

    A weight has the dtype in which its tensors are stored, float32 if these differ. Matrices are transposed views: the
    copy to the device is then the only one that reorders them. `interleaved`: q and k rows are in llama.cpp's rotary
    order.
    """

    def tensor(part: str, layer: int) -> np.ndarray:
        stored = source.read(names[part].format(layer))
        if interleaved and part in ("q", "k", "q_bias", "k_bias"):
            return split_halves(stored, config.head_dim)
        return stored

    def read(*parts: str, layer: int = 0) -> np.ndarray:
        weight = joined([tensor(part, layer) for part in parts])
        return weight if parts == ("embed",) else weight.T  # of a vector the vector itself

    def matrix(part: str, layer: int) -> StoredMatrix:
        found = source.matrix(names[part].format(layer))
        if interleaved and part in ("q", "k"):
            return replace(found, read=lambda: split_halves(found.read(), config.head_dim))
        return found

    shapes = expected_shapes(config)
    readers = {name: partial(read, name) for name in ("embed", "norm", "head") if name in shapes}
    stored: dict[str, Stored] = {name: [matrix(name, 0)] for name in ("embed", "head") if name in shapes}
    for i in range(config.num_layers):
        readers |= {f"layers.{i}.{name}": partial(read, *_FUSED[name], layer=i) for name in layer_shapes(config)}
        stored |= {f"layers.{i}.{name}": [matrix(part, i) for part in _FUSED[name]] for name in MATRICES}
    return LazyWeights(readers, stored)


def joined(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate along the first axis, in the common dtype, or in float32, which holds all others exactly."""
    if len(tensors) == 1:
        return tensors[0]
    dtype = tensors[0].dtype if len({t.dtype for t in tensors}) == 1 else np.float32
    return np.concatenate([t.astype(dtype, copy=False) for t in tensors])


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
