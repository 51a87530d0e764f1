"""The tiny model to try training with; docs/train.md's commands train on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxspec.models.config import DecoderConfig
from jaxspec.models.load import load_model
from jaxspec.models.load.parts import weight_shapes
from jaxspec.train_predictor import tiny_model


def test_the_folder_holds_the_weights_and_a_chat_tokenizer(tmp_path: Path) -> None:
    words = tiny_model.tokenizer()
    config = DecoderConfig("llama", len(words), 32, 48, 2, 4, 2, 8, 128, tie_embeddings=True)
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=s).astype(np.float32) for name, s in weight_shapes(config).items()}
    words.save_pretrained(tmp_path)
    tiny_model.save(tmp_path, config, weights)
    model = load_model(str(tmp_path))
    assert weights.keys() == set(model.weights)
    for name, weight in weights.items():
        np.testing.assert_array_equal(model.weights[name], weight)
    asked, answer = next(iter(tiny_model.TEXTS.items()))
    prompt = model.tokenizer.apply_chat_template([{"role": "user", "content": asked}])
    row = tiny_model.rows(words)[0]
    length = int((row >= 0).sum())
    assert model.tokenizer.decode(row[:length].tolist(), skip_special_tokens=False) == f"{prompt}{answer}<|end|>"
    assert model.tokenizer.eos_token_ids == (int(row[length - 1]),)
