"""Record the logits of tiny random models of every family, by transformers on torch in float32.

Needs `torch transformers safetensors ml_dtypes`, which the project itself doesn't:

    python tests/golden/record_families.py

Writes families.json (settings, and names and shapes of tensors as `save_pretrained` writes them) and families.npz
(logits of some positions of one sequence). The weights are `helpers.families.tensor` of their names.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.families import GOLDEN, LOGITS, RECORDED, write

SEQUENCE = 40
#: Positions whose logits are kept.
KEPT = np.asarray([0, 1, 5, 11, 12, 17, 23, 39])
#: Keys of config.json that say nothing about the model.
NOISE = ("transformers_version", "use_cache", "initializer_range", "architectures", "dtype", "torch_dtype")

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
#: For families without grouped queries or a head size of their own.
PLAIN = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")} | {"hidden_size": 64}
GPT2 = {
    "vocab_size": 320, "n_embd": 64, "n_inner": 48, "n_layer": 3, "n_head": 4, "n_positions": 256, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

MODELS: dict[str, dict[str, Any]] = {
    "yarn": {"model_type": "llama", "rope_parameters": YARN},
    "biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "gemma2": {
        "model_type": "gemma2", "sliding_window": 12, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 12, "query_pre_attn_scalar": 16,
               "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "phi3_short": {
        "model_type": "phi3", "hidden_size": 64, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE,
    },
    "phi3_long": {
        "model_type": "phi3", "hidden_size": 64, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE,
        "sliding_window": 20,
    },
    "phi3_partial": {"model_type": "phi3", "partial_rotary_factor": 0.75},
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4},
    "granite": {
        "model_type": "granite", "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "qwen2_moe": {
        "model_type": "qwen2_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "qwen3_moe_unnormalised": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": False,
    },
}  # fmt: skip
PLAIN_MODELS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.5},
    "gpt_neox_sequential": {"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 1.0},
    "opt": {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 64},
}


def configs() -> dict[str, dict[str, Any]]:
    found = {name: SIZES | settings for name, settings in MODELS.items()}
    found |= {name: PLAIN | settings for name, settings in PLAIN_MODELS.items()}
    return found | {"gpt2": GPT2 | {"model_type": "gpt2"}}


def settings_of(folder: Path) -> dict[str, Any]:
    raw = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in raw.items() if key not in NOISE}


def tensors_of(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def main() -> None:
    tokens = np.random.default_rng(0).integers(2, SIZES["vocab_size"], SEQUENCE).astype(np.int32)
    arrays: dict[str, np.ndarray] = {"tokens": tokens, "kept": KEPT}
    kept: dict[str, dict[str, Any]] = {}
    for name, settings in configs().items():
        with tempfile.TemporaryDirectory() as scratch:
            first, second = Path(scratch) / "first", Path(scratch) / "second"
            config = AutoConfig.for_model(**settings)
            AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(first)
            kept[name] = {"config": settings_of(first), "tensors": tensors_of(first)}
            write(second, **kept[name])
            model = AutoModelForCausalLM.from_pretrained(
                second, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            with torch.no_grad():
                logits = model(torch.from_numpy(tokens)[None].long()).logits[0].float().numpy()
        arrays[name] = logits[KEPT]
        weights = sum(int(np.prod(shape)) for shape in kept[name]["tensors"].values())
        print(f"{name}: {weights} weights, logits ±{logits.std():.2f}")
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in kept.items())
    RECORDED.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    np.savez_compressed(LOGITS, **arrays)
    assert GOLDEN.is_dir()


if __name__ == "__main__":
    main()
