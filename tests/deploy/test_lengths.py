"""What an ingress expects of output lengths."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from jaxspec.deploy.lengths import ExpectedLengths


class Fixed:
    name = "fixed"

    def __init__(self, length: float, seconds: float = 0.0) -> None:
        self.length, self.seconds, self.warm = length, seconds, False

    def programs(self) -> list[tuple[str, Callable[[], None]]]:
        return []

    def warm_up(self) -> None:
        self.warm = True

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        time.sleep(self.seconds)
        if texts == ["?"]:
            raise ValueError("no idea")
        return np.full(len(texts), self.length)


def test_the_mean_of_what_has_ended() -> None:
    lengths = ExpectedLengths()
    assert asyncio.run(lengths.of([1], 100)) is None
    for _ in range(40):
        lengths.ended(50)
    assert asyncio.run(lengths.of([1], 100)) == pytest.approx(50)
    assert asyncio.run(lengths.of([1], 20)) == 20


def test_a_predictor_is_asked_for_as_long_as_it_may_take() -> None:
    async def main(predictor: Fixed, wait: float, text: str = "x") -> float | None:
        lengths = ExpectedLengths(predictor, lambda ids: text, wait)
        assert await lengths.of([1, 2], 100) is None, "it is not warm"
        lengths.start()
        try:
            while not lengths.warm:
                await asyncio.sleep(0.001)
            assert predictor.warm
            return await lengths.of([1, 2], 100)
        finally:
            lengths.close()

    assert asyncio.run(main(Fixed(7.0), 30)) == 7
    assert asyncio.run(main(Fixed(0.2), 30)) == 1, "a request has a token"
    assert asyncio.run(main(Fixed(7.0, seconds=0.2), 0.01)) is None
    assert asyncio.run(main(Fixed(7.0), 30, "?")) is None
