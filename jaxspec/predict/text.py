"""From a prompt's text to what an encoder reads."""

from __future__ import annotations

from tokenizers import Tokenizer

#: Tokens of BERT's input, its two marks included.
MOST = 512


def clip(tokenizer: Tokenizer, text: str, most: int = MOST) -> list[int]:
    """Ids of `[CLS] … [SEP]`, at most `most`; of a longer text the last tokens stay (SSJF, §3.1: of a conversation in
    rounds, the latest). Lone surrogates become question marks."""
    body = tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    assert first is not None and last is not None, "a BERT tokenizer has both"
    return [first, *body[max(0, len(body) - (most - 2)) :], last]
