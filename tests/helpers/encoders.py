"""A tiny random BERT encoder with a small WordPiece vocabulary, and a `ProxyPredictor` on top of it."""

from __future__ import annotations

from typing import Any

from flax import nnx
from tokenizers import Tokenizer
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

from jaxspec.models.bert import BertConfig, BertEncoder
from jaxspec.models.length_head import LengthHead
from jaxspec.predict.formulation import Formulation
from jaxspec.predict.proxy import ProxyPredictor

WORDS = [
    "short", "long", "a", "the", "tell", "me", "write", "list", "explain", "story", "code", "one", "two",
    "three", "four", "five",
]  # fmt: skip
#: Output lengths that the predictor's formulation is fitted to.
LENGTHS = [float(n) for n in (3, 5, 8, 13, 21, 34, 55, 89, 144, 233)]


def tokenizer() -> Tokenizer:
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + c for c in letters), *WORDS]
    made = BertWordPieceTokenizer({token: i for i, token in enumerate(dict.fromkeys(tokens))})
    return Tokenizer.from_str(made.to_str())


def config(**changes: Any) -> BertConfig:
    sizes: dict[str, Any] = dict(
        vocab_size=len(tokenizer().get_vocab()), hidden=16, layers=2, heads=2, intermediate=24, max_positions=48
    )
    return BertConfig(**{**sizes, **changes})


def proxy(name: str = "reg_l1", seed: int = 0, **changes: Any) -> ProxyPredictor:
    """An untrained predictor. Embeddings are scaled up so that its predictions differ between texts."""
    c, rngs = config(**changes), nnx.Rngs(seed)
    formulation = Formulation.fit(name, LENGTHS)
    encoder = BertEncoder(c, rngs)
    tokens = encoder.tokens
    assert isinstance(tokens, nnx.Embed)
    tokens.embedding[...] = tokens.embedding[...] * 50
    return ProxyPredictor(encoder, LengthHead(c.hidden, 8, formulation.outputs, rngs), formulation, tokenizer(), "tiny")
