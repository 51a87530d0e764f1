"""Tiny random models of every family: `golden/families.json` has their settings, and names and shapes of their tensors,
as transformers saves them. Their weights are made of the names, so the recorded logits are all that is kept of them.

Imports nothing of the project: `golden/record_families.py` uses it in an environment of its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parents[1] / "golden"
RECORDED = GOLDEN / "families.json"
LOGITS = GOLDEN / "families.npz"


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values in bfloat16, large enough that attention is far from uniform, and norms and biases not one and zero."""
    noise = np.random.default_rng(crc32(name.encode())).standard_normal(shape, np.float32)
    if name.endswith("bias"):
        values = 0.3 * noise
    elif any(part in name for part in ("norm", "ln_")):
        values = 1 + 0.2 * noise
    elif any(part in name for part in ("embed_tokens", "embed_in", "embed_positions", "wte", "wpe")):
        values = 0.25 * noise
    else:
        values = noise * 1.5 * shape[-1] ** -0.5
    return values.astype(ml_dtypes.bfloat16)


def recorded() -> dict[str, dict[str, Any]]:
    """Model -> config: its config.json; tensors: name -> shape."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def write(folder: Path, config: dict[str, Any], tensors: dict[str, list[int]]) -> Path:
    """A Hugging Face folder, with the tokenizer of the recorded Llama."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor(name, tuple(shape)) for name, shape in tensors.items()}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(GOLDEN / "llama" / name, folder / name)
    return folder
