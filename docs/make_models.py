"""Writes the tables of docs/models.md from the families' rows and recorded models: `python docs/make_models.py`. A test
fails while the page is out of date."""

from __future__ import annotations

import json
from pathlib import Path

from jaxspec.kernels.packed import FORMATS
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.gguf_families import ARCHITECTURES
from jaxspec.models.load.hf_config import decoder_config
from jaxspec.models.load.hf_families import FAMILIES

PAGE = Path(__file__).parent / "models.md"
GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
#: `model_type` -> what people call the models, and their `general.architecture` in GGUF files.
MODELS = {
    "llama": ("Llama 1 to 3, SmolLM2 and others of this form", "llama"),
    "mistral": ("Mistral", "llama"),
    "qwen2": ("Qwen2, Qwen2.5", "qwen2"),
    "qwen3": ("Qwen3", "qwen3"),
    "phi3": ("Phi-3, Phi-4 mini (as a folder)", "phi3"),
    "gemma2": ("Gemma 2", "gemma2"),
    "gemma3_text": ("Gemma 3, the text models", "gemma3"),
    "olmo2": ("OLMo-2", "olmo2"),
    "smollm3": ("SmolLM3", "smollm3"),
    "granite": ("Granite 3", "granite"),
    "mixtral": ("Mixtral", "llama"),
    "qwen2_moe": ("Qwen1.5-MoE, Qwen2-MoE", "qwen2moe"),
    "qwen3_moe": ("Qwen3-MoE", "qwen3moe"),
    "gpt_neox": ("GPT-NeoX, Pythia", "gptneox"),
    "gpt2": ("GPT-2", "gpt2"),
    "opt": ("OPT", ""),
}


def example(family: str) -> DecoderConfig:
    """A recorded model's configuration."""
    recorded = json.loads((GOLDEN / "families.json").read_text(encoding="utf-8"))
    for entry in recorded.values():
        if entry["config"]["model_type"] == family:
            return decoder_config(entry["config"], family)
    return decoder_config(json.loads((GOLDEN / family / "config.json").read_text(encoding="utf-8")), family)


def parts(c: DecoderConfig) -> tuple[str, str, str]:
    """Norms and positions; attention; MLP."""
    norm = {"before": "", "after": ", after blocks", "both": ", before and after blocks"}[c.norm_place]
    place = "learned positions" if c.positions == "learned" else "rotary"
    place += f", {c.rotated} of {c.head_dim} dimensions" if c.rotary_dim else ""
    place += ", another base in windowed layers" if c.local_rope_theta else ""
    place += ", not in every fourth layer" if c.unrotated_layers else ""
    attention = [
        "biases" if c.qkv_bias else "",
        {None: "", "head": "q/k norms", "all": "q/k norms over all heads"}[c.qk_norm],
        "softcaps" if c.attention_softcap else "",
        "" if c.sliding_window is None else "alternating windows" if c.windowed_layers else "windows",
    ]
    mlp = f"{c.activation}{', gated' if c.gated else ''}"
    if c.experts is not None:
        mlp = f"{c.experts.chosen} of {c.experts.count} experts" + (", one shared" if c.experts.shared_width else "")
    mlp += ", next to attention" if c.parallel_residual else ""
    return f"{c.norm}{norm}; {place}", ", ".join(a for a in attention if a) or "plain", mlp


def families() -> str:
    """The table of families. The settings are those of the recorded tiny models."""
    lines = [
        "| models | `model_type` | GGUF | norms; positions | attention | MLP |",
        "|---|---|---|---|---|---|",
    ]
    for name, (models, gguf) in MODELS.items():
        file = f"`{gguf}`" if gguf else "none"
        lines.append(f"| {models} | `{name}` | {file} | {' | '.join(parts(example(name)))} |")
    return "\n".join(lines)


def formats() -> str:
    """The table of weights."""
    packed = ", ".join(f for f in FORMATS if f.startswith("Q"))
    rows = [
        ("float32, bfloat16, float16", "safetensors, GGUF", "kept as they are"),
        (packed, "GGUF", "kept as they are, widened in registers"),
        ("INT8 (compressed-tensors), a scale per output or tensor", "safetensors", "kept as they are"),
        ("FP8 (`fp8` in blocks, `fbgemm_fp8`, compressed-tensors)", "safetensors", "float32"),
        ("other types that the `gguf` package reads", "GGUF", "float32"),
    ]
    return "\n".join(["| weights | files | in memory, native CPU kernels |", "|---|---|---|"] + [
        f"| {weights} | {files} | {kept} |" for weights, files, kept in rows
    ])  # fmt: skip


def page() -> str:
    """The page with its tables made again."""
    assert MODELS.keys() == FAMILIES.keys()
    assert {gguf for _, gguf in MODELS.values() if gguf} == ARCHITECTURES.keys()
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("families", families()), ("formats", formats())):
        before, rest = text.split(f"<!-- {name} -->\n")
        _, after = rest.split(f"<!-- end of {name} -->")
        text = f"{before}<!-- {name} -->\n{table}\n<!-- end of {name} -->{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
