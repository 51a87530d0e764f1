"""Configuration of a LLaMA-family decoder, read from a Hugging Face `config.json` or a GGUF header."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of rotary embeddings. `linear`: positions / `factor`. `llama3`: by wavelength (Llama 3.1)."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and options of Llama, Mistral, Qwen2, Qwen3 and SmolLM2 models."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    #: A query attends to this many positions, its own included; None: to all.
    sliding_window: int | None = None
    #: Layers with the sliding window; empty: all.
    windowed_layers: tuple[int, ...] = field(default=())
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
