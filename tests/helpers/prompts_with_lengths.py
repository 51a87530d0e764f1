"""A tiny encoder, and prompts whose first word determines the output length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import tokenizers
from flax import nnx
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from jaxspec.models.bert import BertConfig, BertEncoder
from jaxspec.models.load.bert import LoadedEncoder
from jaxspec.train_predictor.data import Corpus, Row, corpus, group_of

#: First word of a prompt -> median number of output tokens.
KINDS = {"name": 4, "list": 20, "explain": 60, "write": 150}
FILLERS = ("the", "a", "tree", "river", "engine", "letter", "please", "now")


@cache
def tokenizer() -> tokenizers.Tokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *KINDS, *FILLERS]
    made = tokenizers.Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    return made


def encoder(seed: int = 0, layers: int = 1) -> LoadedEncoder:
    config = BertConfig(
        vocab_size=tokenizer().get_vocab_size(), hidden=16, layers=layers, heads=2, intermediate=32, max_positions=64
    )
    return LoadedEncoder(config, BertEncoder(config, nnx.Rngs(seed)), tokenizer())


def rows(count: int, cap: int = 128, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a data file: prompts of 3 to 12 words with output lengths, cut at `cap` and then marked `capped`."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        kind = str(rng.choice(list(KINDS)))
        prompt = " ".join([kind, *rng.choice(FILLERS, rng.integers(2, 12))])
        length = max(1, round(KINDS[kind] * float(rng.lognormal(0, 0.1))))
        out.append({"prompt": prompt, "length": min(length, cap), "capped": length > cap})
    return out


def made(lines: Sequence[dict[str, Any]]) -> Corpus:
    from jaxspec.predict.predictor import clip

    read = [Row(r["prompt"], r["length"], r["capped"], group_of(r["prompt"])) for r in lines]
    return corpus(read, lambda text: clip(tokenizer(), text, 32), 0.15, 0.15)
