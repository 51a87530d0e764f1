"""Configuration of a decoder, read from a Hugging Face `config.json` or a GGUF header.

A family of models is a combination of these parts: there is no code for one family alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log, sqrt
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of rotary embeddings.

    linear: positions / `factor`. llama3: by wavelength (Llama 3.1). yarn: frequencies between `beta_slow` and
    `beta_fast` rotations within the original context are interpolated (Peng et al. 2023, arXiv 2309.00071). longrope: a
    divisor for each frequency, `long` where the context is longer than the original one, else `short` (Ding et al.
    2024, arXiv 2402.13753). `attention_factor` scales cosines and sines.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    #: Whether yarn's bounds are rounded to whole frequencies.
    truncate: bool = True
    attention_factor: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of each layer's MLP.

    count: experts of a layer. chosen: experts of a token, those with the highest router logits. width: intermediate
    size of one. normalised: whether the weights of the chosen ones sum to 1, else they are those of a softmax over all.
    shared_width: intermediate size of an expert that all tokens use, each with a weight of its own; 0: there is none.
    """

    count: int
    chosen: int
    width: int
    normalised: bool = True
    shared_width: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "chosen", "width"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"the {name} of experts must be a positive whole number, not {value!r}")
        if self.chosen > self.count:
            raise ValueError(f"{self.chosen} of {self.count} experts cannot be chosen")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and parts of a decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int

    #: Norms: by root mean square, or by mean and variance with a bias.
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    #: Norms of a block's input, of its output, or of both.
    norm_place: Literal["before", "after", "both"] = "before"

    #: Rotary embeddings, or a table that is added to the embedding.
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    #: Leading dimensions of each head that are rotated; None: all.
    rotary_dim: int | None = None
    #: Base of the rotary embeddings in layers with the sliding window, which are then not scaled; None: as in the
    #: others.
    local_rope_theta: float | None = None
    #: Layers without rotary embeddings.
    unrotated_layers: tuple[int, ...] = field(default=())

    qkv_bias: bool = False
    o_bias: bool = False
    #: Norm of queries and keys: of each head, or of all heads together.
    qk_norm: Literal["head", "all"] | None = None
    #: Attention scores are multiplied by this; None: head_dim ** -0.5.
    attention_scale: float | None = None
    #: Attention scores s become c * tanh(s / c).
    attention_softcap: float | None = None
    #: A query attends to this many positions, its own included; None: to all.
    sliding_window: int | None = None
    #: Layers with the sliding window; empty: all.
    windowed_layers: tuple[int, ...] = field(default=())

    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    #: Whether the MLP multiplies its activation by a second projection.
    gated: bool = True
    mlp_bias: bool = False
    experts: Experts | None = None
    #: Whether attention and MLP of a layer read the same input, and their outputs are added to it.
    parallel_residual: bool = False
    #: What each block adds is multiplied by this.
    residual_scale: float = 1.0

    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    #: Logits are multiplied by this, and then become c * tanh(logit / c).
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def for_length(self, positions: int) -> DecoderConfig:
        """The configuration for requests of at most `positions` tokens: decides between LongRoPE's divisors, as
        llama.cpp does. Then a token's keys do not depend on how long its request becomes."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope" or positions > scaling.original_max_position:
            return self
        return replace(self, rope_scaling=replace(scaling, long=scaling.short))

    def first(self, layers: int) -> DecoderConfig:
        """The configuration of a decoder of the first `layers` layers."""
        windowed = tuple(i for i in self.windowed_layers if i < layers)
        window = self.sliding_window if windowed or not self.windowed_layers else None
        unrotated = tuple(i for i in self.unrotated_layers if i < layers)
        return replace(
            self, num_layers=layers, windowed_layers=windowed, sliding_window=window, unrotated_layers=unrotated
        )

    def alike(self, layers: int) -> DecoderConfig:
        """The configuration of a drafter of `layers` layers, all alike: no sliding window, all of them rotated."""
        return replace(
            self, num_layers=layers, windowed_layers=(), sliding_window=None, unrotated_layers=(), local_rope_theta=None
        )

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer in positions, or None."""
        windowed = not self.windowed_layers or layer in self.windowed_layers
        return self.sliding_window if windowed else None

    def rope_of(self, layer: int) -> int:
        """Which of the tables of `rotary.rope_tables` a layer's queries and keys are rotated by."""
        if layer in self.unrotated_layers:
            return 1
        return int(self.local_rope_theta is not None and self.window_of(layer) is not None)


def longrope_attention(factor: float, original: int) -> float:
    """LongRoPE's scale of cosines and sines, for a context `factor` times as long as the original one."""
    return 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original))
