"""Record what an independent implementation (transformers on torch, float32) computes, for the tests to compare with.

Needs `torch transformers gguf safetensors sentencepiece`, which the project itself doesn't:

    python tests/golden/record.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Writes next to itself: smollm2.json (greedy continuations by transformers' own GGUF reader), and for each tiny random
model a Hugging Face folder and its logits in logits.npz; spm.json (a small SentencePiece vocabulary and what it makes
of some texts).
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
NEW_TOKENS = 64
SEQUENCE = 40
PROMPTS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Explain in a few sentences why the sky looks blue at noon and red at sunset."}],
    [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number without recursion."}],
    [
        {
            "role": "user",
            "content": "A train leaves at 9:40 and arrives at 13:05. How long is the trip? Show your steps.",
        }
    ],
    [{"role": "user", "content": "List ten things to pack for a rainy weekend in the mountains."}],
    [{"role": "user", "content": "Tell me a story about a lighthouse keeper who finds a letter in a bottle."}],
    [
        {"role": "system", "content": "You are a terse assistant who answers as a ship's cook."},
        {"role": "user", "content": "What shall we have for dinner?"},
        {"role": "assistant", "content": "Fish stew, with what's left of the onions."},
        {"role": "user", "content": "Again? Describe how you make it, from the beginning."},
    ],
    [
        {
            "role": "user",
            "content": "Translate into French, then explain the grammar: «The café's naïve owner paid 1,250 €.» ☕",
        }
    ],
    [{"role": "user", "content": '{\n  "task": "summarise",\n  "text": "Bees dance to tell where flowers are."\n}'}],
]

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "attn_implementation": "eager",
}


def rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **(scaling or {"rope_type": "default"})}}


def tiny_models() -> dict[str, PreTrainedModel]:
    """One model for each thing a configuration can switch."""
    llama3 = rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    windows = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**COMMON, **rope())),
        "llama3_rope": LlamaForCausalLM(LlamaConfig(**COMMON, **llama3, tie_word_embeddings=True)),
        "linear_rope": LlamaForCausalLM(
            LlamaConfig(**COMMON, **rope(rope_type="linear", factor=4.0), tie_word_embeddings=True)
        ),
        "mistral": MistralForCausalLM(MistralConfig(**COMMON, **rope(), sliding_window=16)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**COMMON, **rope(), **windows)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**(COMMON | {"head_dim": 16}), **rope(), tie_word_embeddings=True)),
    }


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that attention is far from uniform, and norms and biases that are not one and zero.

    They are rounded to bfloat16, the type they are saved in.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.2 * noise
        elif "embed" in name:
            value = 0.25 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        else:
            value = noise * 1.5 * weight.shape[-1] ** -0.5
        weight.data = value.to(torch.bfloat16).float()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with all 256 bytes, two special tokens and a few merges: 320 tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = (message["content"] for conversation in PROMPTS * 4 for message in conversation)
    trainer = trainers.BpeTrainer(
        vocab_size=COMMON["vocab_size"],
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(text, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
    )
    return tokenizer


def record_tiny() -> None:
    tokens = np.random.default_rng(0).integers(2, COMMON["vocab_size"], SEQUENCE).astype(np.int32)
    arrays: dict[str, np.ndarray] = {"tokens": tokens}
    tokenizer = tiny_tokenizer()
    for seed, (name, model) in enumerate(tiny_models().items()):
        randomise(model, seed)
        model = model.eval()
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)[None].long()).logits[0]
        arrays[name] = logits.numpy().astype(np.float32)
        print(f"{name}: {model.num_parameters()} parameters, logits ±{logits.std():.2f}")
        model.to(torch.bfloat16).save_pretrained(HERE / name)
        tokenizer.save_pretrained(HERE / name)
    np.savez_compressed(HERE / "logits.npz", **arrays)


def record_spm() -> None:
    """SentencePiece BPE as Llama 2 has it: bytes for what it doesn't know, a space put before the text."""
    lines = [message["content"] for conversation in PROMPTS for message in conversation]
    lines += ["aaaa aaa aa  hahaha", "    indented = 1", "...... ------ 1000"] * 8
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=520,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    spm = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = {"unknown": spm.is_unknown, "control": spm.is_control, "byte": spm.is_byte}
    ids = range(spm.vocab_size())
    texts = [
        *("", " ", "  two  spaces ", "rainy weekend", "aaaaaaa aaaaa", "line\n\tindent", "1,250 €", "naïve café ☕ 雨"),
        *("...-----...", "hahahahaha"),
        *lines[:3],
    ]
    spec = {
        "tokens": [spm.id_to_piece(i) for i in ids],
        "scores": [spm.get_score(i) for i in ids],
        "types": [next((kind for kind, holds in kinds.items() if holds(i)), "normal") for i in ids],
    }
    write_json(HERE / "spm.json", [spec | {"cases": [[text, spm.encode(text)] for text in texts]}])


def record_smollm2(path: Path) -> None:
    """Greedy tokens and how sure each was: the gap between the two best logits. The end token doesn't stop it."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = LlamaForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    cases = []
    for messages in PROMPTS:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        output, margins = greedy(model, prompt)
        print(repr(tokenizer.decode(output)), f"least margin {min(margins):.4f}")
        cases.append({"messages": messages, "prompt_ids": prompt, "output_ids": output, "margins": margins})
    write_json(HERE / "smollm2.json", cases)


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    output: list[int] = []
    margins: list[float] = []
    ids, cache = torch.tensor([prompt]), None
    for _ in range(NEW_TOKENS):
        step = model(ids, past_key_values=cache, use_cache=True)
        best = step.logits[0, -1].topk(2)
        output.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 6))
        ids, cache = best.indices[:1][None], step.past_key_values
    return output, margins


def write_json(path: Path, cases: list[dict[str, Any]]) -> None:
    """One line a field, so that a change shows."""
    lines = [",\n  ".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in c.items()) for c in cases]
    path.write_text("[\n" + ",\n".join(f" {{\n  {line}\n }}" for line in lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    torch.manual_seed(0)
    record_tiny()
    record_spm()
    for path in sys.argv[1:]:
        record_smollm2(Path(path))
