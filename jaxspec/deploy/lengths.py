"""The output lengths that an ingress expects of requests, before it routes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jaxspec.predict.predictor import LengthPredictor

log = logging.getLogger(__name__)

#: Weight of the newest length in the running mean, and lengths that it needs to be used.
_WEIGHT, _ENOUGH = 0.05, 20
#: Last prompt tokens that are decoded for a predictor.
_TOKENS_READ = 2048


class ExpectedLengths:
    """Predicts with the deployment's length predictor, if there is one and it answers within `wait` seconds.

    Otherwise the mean length of the requests that have ended here, once there are enough of them. `decode` turns token
    ids into text.
    """

    def __init__(
        self,
        predictor: LengthPredictor | None = None,
        decode: Callable[[Sequence[int]], str] = lambda ids: "",
        wait: float = 0.05,
    ) -> None:
        self._predictor, self._decode, self._wait = predictor, decode, wait
        # A predictor is called from one thread at a time.
        self._thread = ThreadPoolExecutor(1, "jaxspec-lengths") if predictor is not None else None
        self._warm: Future[None] | None = None
        self._mean, self._ended = 0.0, 0

    def close(self) -> None:
        """End the predictor's thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def warm(self) -> bool:
        """Whether the predictor is asked."""
        return self._warm is not None and self._warm.done()

    def start(self) -> None:
        """Compile the predictor's programs in its thread. Until that is done, it is not asked."""
        if self._predictor is not None and self._thread is not None:
            self._warm = self._thread.submit(self._predictor.warm_up)

    async def of(self, prompt: Sequence[int], max_tokens: int) -> float | None:
        """Expected output tokens, at most `max_tokens`; None: not known."""
        expected = await self._predicted(prompt)
        if expected is None and self._ended >= _ENOUGH:
            expected = max(1.0, self._mean)
        return None if expected is None else min(expected, float(max_tokens))

    def ended(self, tokens: int) -> None:
        """A request has ended by itself with `tokens` output tokens."""
        self._ended += 1
        self._mean += (tokens - self._mean) * max(_WEIGHT, 1 / self._ended)

    async def _predicted(self, prompt: Sequence[int]) -> float | None:
        if self._thread is None or not self.warm:
            return None
        future = asyncio.get_running_loop().run_in_executor(self._thread, self._predict, prompt[-_TOKENS_READ:])
        try:
            return await asyncio.wait_for(future, self._wait)
        except TimeoutError:
            return None

    def _predict(self, prompt: Sequence[int]) -> float | None:
        assert self._predictor is not None
        try:
            return max(1.0, float(self._predictor.predict([self._decode(prompt)])[0]))
        except Exception:
            log.exception("the length predictor failed")
            return None
