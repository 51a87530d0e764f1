"""A fake length predictor, and a fake encoder that makes embeddings from hashes of texts."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from helpers.patience import PATIENCE

WIDTH = 16


def vector(text: str, width: int = WIDTH) -> np.ndarray:
    """A random unit vector of the text `[width]` float32. Texts that differ only after a "|" have similarity 0.99."""
    stem, _, rest = text.partition("|")
    own, other = (np.random.default_rng(zlib.crc32(t.encode())).normal(size=width) for t in (stem, rest))
    own /= np.linalg.norm(own)
    if rest:
        other -= other @ own * own
        own = 0.99 * own + np.sqrt(1 - 0.99**2) * other / np.linalg.norm(other)
    return own.astype(np.float32)


class FakePredictor:
    """Predicts `length` for every text and records the texts in `asked`. If `gate` is given, it waits for it first."""

    name = "fake"

    def __init__(self, length: float = 7.0, gate: threading.Event | None = None) -> None:
        self.length, self.gate = length, gate
        self.asked: list[list[str]] = []
        self.warm = 0
        self.fail: Exception | None = None

    def programs(self) -> list[tuple[str, Callable[[], None]]]:
        return []

    def warm_up(self) -> None:
        self.warm += 1

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        self.asked.append(list(texts))
        if self.gate is not None:
            assert self.gate.wait(PATIENCE)
        if self.fail is not None:
            raise self.fail
        return np.full(len(texts), self.length)


class FakeEncoder:
    """Embeds each text as `vector` does and records the texts in `asked`."""

    name = "fake"

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.warm = 0

    def programs(self) -> list[tuple[str, Callable[[], None]]]:
        return []

    def warm_up(self) -> None:
        self.warm += 1

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.asked.append(list(texts))
        return np.stack([vector(text) for text in texts])
