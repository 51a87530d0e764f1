"""The interface of length predictors, and their tokenisation of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from tokenizers import Tokenizer

#: Most tokens of BERT's input, [CLS] and [SEP] included.
MOST = 512


def clip(tokenizer: Tokenizer, text: str, most: int = MOST) -> list[int]:
    """Ids of `[CLS] … [SEP]`, at most `most`. A longer text keeps its last tokens (SSJF, §3.1: the latest rounds of a
    conversation). Lone surrogates become question marks."""
    body = tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    assert first is not None and last is not None, "a BERT tokenizer has both"
    return [first, *body[max(0, len(body) - (most - 2)) :], last]


class LengthPredictor(Protocol):
    """Predicts from a prompt's text how many tokens the answer will have. Called from one thread at a time."""

    @property
    def name(self) -> str: ...

    def programs(self) -> list[tuple[str, Callable[[], None]]]:
        """Compile jobs for any thread, as (name, job). Running them beforehand leaves less for `warm_up`."""
        ...

    def warm_up(self) -> None:
        """Compile all shapes of `predict`."""
        ...

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        """Predicted output tokens `[n]`, float64 and positive."""
        ...


class TextEncoder(Protocol):
    """Embeds prompts. Called from one thread at a time."""

    @property
    def name(self) -> str: ...

    def programs(self) -> list[tuple[str, Callable[[], None]]]:
        """Compile jobs for any thread, as (name, job). Running them beforehand leaves less for `warm_up`."""
        ...

    def warm_up(self) -> None:
        """Compile all shapes of `embed`."""
        ...

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings `[n, H]` float32, unit vectors."""
        ...


@runtime_checkable
class Learner(Protocol):
    """A predictor that learns from served requests."""

    def learn(self, texts: Sequence[str], lengths: Sequence[int]) -> None:
        """Learn the true output tokens of these prompts."""
        ...

    def flush(self) -> None:
        """Persist what was learned since the last call, if the predictor has a file."""
        ...
