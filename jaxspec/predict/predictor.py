"""What a length predictor is, and the text that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
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


class LengthPredictor(Protocol):
    """Says from a prompt's text how many tokens the answer will have. Called from one thread at a time."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str:
        """Tells predictors of the same name apart."""
        ...

    def programs(self, embeddings: bool = False) -> list[tuple[str, Callable[[], None]]]:
        """What `warm_up` compiles, one by one: (name, job for any thread). Without them `warm_up` compiles all."""
        ...

    def warm_up(self, embeddings: bool = False) -> None:
        """Compile whatever `predict` will run, or with `embeddings` whatever `embed` and `read` will."""
        ...

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        """Output tokens `[n]`, float64 and positive."""
        ...

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings `[n, H]`, float32 and of length 1."""
        ...

    def read(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """What `predict` and `embed` give, for the cost of one of them."""
        ...


@runtime_checkable
class Learner(Protocol):
    """A predictor that gets better with what it is told of the requests served."""

    def learn(self, texts: Sequence[str], lengths: Sequence[int]) -> None:
        """Take in the true output tokens of these prompts."""
        ...

    def flush(self) -> None:
        """Write down what was learned since the last time, if it is kept anywhere."""
        ...
