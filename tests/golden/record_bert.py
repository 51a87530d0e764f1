"""Record what an independent implementation (transformers on torch, float32) makes of texts with encoders.

Needs `torch transformers`, which the project itself doesn't:

    python tests/golden/record_bert.py path/to/all-MiniLM-L6-v2

Writes next to itself: for each tiny random encoder a Hugging Face folder; encoders.npz, its last hidden states of
tokens in padded rows, and the embeddings of TEXTS by the real model (the mean over tokens, of length 1, and the first
token's vector); encoders.json, the texts and their token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM, BertModel, PreTrainedModel

HERE = Path(__file__).parent
TEXTS = [
    "Explain in a few sentences why the sky looks blue at noon and red at sunset.",
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "hi",
    "",
    "Translate into French, then explain the grammar: «The café's naïve owner paid 1,250 €.» ☕ 你好",
    '{\n  "task": "summarise",\n  "text": "Bees dance to tell where flowers are."\n}',
    "A lighthouse keeper finds a letter in a bottle. " * 30,
]
WORDS = [
    "the", "a", "an", "is", "are", "of", "to", "in", "and", "write", "tell", "me", "story", "about", "sky",
    "blue", "red", "why", "how", "list", "ten", "things", "number",
]  # fmt: skip
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
}


def vocabulary() -> list[str]:
    """Special tokens, printable ASCII as words and as parts of words, a few words and endings."""
    characters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    parts = ["##" + c for c in characters] + ["##s", "##ing", "##er"]
    return list(dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *parts, *WORDS]))


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that attention is far from uniform, and norms and biases that are not one and zero.

    They are rounded to bfloat16, the type they are saved in.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("LayerNorm.weight"):
            value = 1 + 0.2 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif "embeddings" in name:
            value = 0.5 * noise
        else:
            value = noise * 1.5 * weight.shape[-1] ** -0.5
        weight.data = value.to(torch.bfloat16).float()


def record_tiny(arrays: dict[str, np.ndarray]) -> None:
    """One as sentence encoders are saved, one as BERT itself: under a prefix, with heads, and only a vocabulary."""
    words = vocabulary()
    sizes = COMMON | {"vocab_size": len(words)}
    models: dict[str, PreTrainedModel] = {
        "encoder": BertModel(BertConfig(**sizes, hidden_act="gelu")),
        "encoder_prefixed": BertForMaskedLM(BertConfig(**sizes, hidden_act="gelu_new", layer_norm_eps=1e-6)),
    }
    rng = np.random.default_rng(0)
    ids = rng.integers(5, len(words), (3, 40)).astype(np.int32)
    mask = np.arange(40) < np.asarray([40, 17, 1])[:, None]
    arrays |= {"ids": ids, "mask": mask}
    for seed, (name, model) in enumerate(models.items()):
        randomise(model, seed)
        model = model.eval()
        encoder = model.bert if name == "encoder_prefixed" else model
        with torch.no_grad():
            hidden = encoder(torch.from_numpy(ids).long(), torch.from_numpy(mask).long()).last_hidden_state
        arrays[name] = hidden.numpy().astype(np.float32)
        print(f"{name}: {model.num_parameters()} parameters, states ±{hidden.std():.2f}")
        model.to(torch.bfloat16).save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
        (HERE / name / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(HERE / "encoder")
    tokenizer.save_pretrained(HERE / "encoder")


@torch.no_grad()
def record_real(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """All texts in one padded batch."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer.model_max_length = 512
    batch = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    hidden = model.eval()(**batch).last_hidden_state
    there = batch["attention_mask"][..., None].float()
    mean = (hidden * there).sum(1) / there.sum(1)
    arrays["minilm_mean"] = torch.nn.functional.normalize(mean, dim=-1).numpy()
    arrays["minilm_first"] = hidden[:, 0].numpy()


def ids_of(folder: Path) -> list[list[int]]:
    return AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]


if __name__ == "__main__":
    real = Path(sys.argv[1])
    arrays: dict[str, np.ndarray] = {}
    record_tiny(arrays)
    record_real(real, arrays)
    np.savez_compressed(HERE / "encoders.npz", **arrays)
    folders = {"encoder": HERE / "encoder", "encoder_prefixed": HERE / "encoder_prefixed", "minilm": real}
    found = {name: ids_of(folder) for name, folder in folders.items()}
    cases = [{"text": text, **{name: ids[i] for name, ids in found.items()}} for i, text in enumerate(TEXTS)]
    lines = [json.dumps(case, ensure_ascii=False) for case in cases]
    (HERE / "encoders.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
