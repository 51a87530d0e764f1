"""A tiny random model in the formats that the loaders read: a Hugging Face folder and a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 32, 64, 2, 2, 1, 16, 256
SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}</tools>"
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def alphabet() -> list[str]:
    """The 256 characters of a byte-level vocabulary, in a fixed order."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def vocabulary() -> list[str]:
    """Token texts by id: bytes, a few merges, special tokens."""
    return [*alphabet(), *("".join(pair) for pair in merges()), *SPECIAL]


def merges() -> list[tuple[str, str]]:
    return [("t", "h"), ("th", "e"), ("a", "n"), ("Ġ", "the"), ("i", "n")]


def tensors() -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face's names. Logits differ by whole units, so greedy tokens are stable."""
    rng = np.random.default_rng(0)

    def matrix(out: int, inner: int, scale: float) -> np.ndarray:
        return (scale * rng.normal(size=(out, inner)) / np.sqrt(inner)).astype(np.float32)

    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found = {"model.embed_tokens.weight": 4 * matrix(len(vocabulary()), HIDDEN, 1.0) * np.sqrt(HIDDEN)}
    found["model.norm.weight"] = np.full(HIDDEN, 2.0, np.float32)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            found[f"{layer}.self_attn.{part}_proj.weight"] = matrix(rows, HIDDEN, 2.0)
        found[f"{layer}.self_attn.o_proj.weight"] = matrix(HIDDEN, q, 4.0)
        for part in ("gate", "up"):
            found[f"{layer}.mlp.{part}_proj.weight"] = matrix(INTERMEDIATE, HIDDEN, 2.0)
        found[f"{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE, 4.0)
    return {name: value.astype(np.float32) for name, value in found.items()}


def tokenizer() -> Tokenizer:
    """Byte-level BPE."""
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary()[: -len(SPECIAL)])}, merges()))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return backend


def write_folder(folder: Path, shards: int = 1) -> Path:
    """Write a Hugging Face folder. With several shards there is an index. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(vocabulary()),
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "eos_token_id": len(vocabulary()) - 1,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1],
        "chat_template": TEMPLATE, "model_max_length": CONTEXT,
    }  # fmt: skip
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "eos_token_id": [len(vocabulary()) - 1]}
    for name, content in (
        ("config.json", config), ("tokenizer_config.json", settings), ("generation_config.json", sampling),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(content, indent=1))
    tokenizer().save(str(folder / "tokenizer.json"))
    found = tensors()
    if shards == 1:
        save_file(found, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    place = {key: names[i % shards] for i, key in enumerate(found)}
    for name in names:
        save_file({key: found[key] for key in found if place[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


#: Hugging Face's name of a layer's part -> GGUF's.
_GGUF_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path) -> Path:
    """Write the model as a GGUF file, matrices as Q8_0. Returns the path."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    plain = len(vocabulary()) - len(SPECIAL)
    writer.add_token_types([1] * plain + [3] * len(SPECIAL))
    writer.add_token_merges([" ".join(pair) for pair in merges()])
    writer.add_bos_token_id(plain)
    writer.add_eos_token_id(plain + 1)
    writer.add_chat_template(TEMPLATE)
    for name, value in tensors().items():
        kind = gguf.GGMLQuantizationType.F32 if value.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_GGUF_PARTS[part]}.weight"
