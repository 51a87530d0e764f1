"""`AsyncLLM`: the engine in an event loop, with outputs as they are generated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxspec.errors import InvalidRequest
from jaxspec.llm import LLM, SloFields
from jaxspec.models.load import LoadedModel
from jaxspec.outputs import OutputDelta
from jaxspec.sampling_params import SamplingParams
from jaxspec.slo import read, resolve


class AsyncLLM:
    """A model and its engine, for code with an event loop. Arguments and errors as those of `LLM`.

    Loading blocks: construct it before the loop runs, or in a thread. Use it as an async context manager, or call
    `close`.
    """

    def __init__(
        self,
        model: str | LoadedModel | None = None,
        draft: Sequence[str] | str | None = None,
        config: str | None = None,
        **overrides: Any,
    ):
        self._llm = LLM(model, draft, config, **overrides)

    @property
    def engine(self) -> Any:
        """The `Engine`."""
        return self._llm.engine

    @property
    def tokenizer(self) -> Any:
        return self._llm.tokenizer

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the engine. Unfinished requests are aborted."""
        await asyncio.to_thread(self._llm.close)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        slo: SloFields | None = None,
    ) -> AsyncIterator[OutputDelta]:
        """The outputs of one request, a text or token ids, as the engine's steps produce them.

        The last one has a `finish_reason`. Ending the iteration early cancels the request. `params`: by default greedy
        with 16 tokens; for several outputs call it several times. `slo`: as in `LLM.generate`.

        Raises `InvalidRequest`, `QueueFull`, `SloRefused`, `EngineDead`, `EngineDraining`.
        """
        params = params or SamplingParams(temperature=0)
        if params.n != 1:
            raise InvalidRequest("n", "n must be 1: each call is one output")
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[OutputDelta]()

        def on_output(delta: OutputDelta) -> None:  # in the engine's thread
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, delta)

        engine, delta = self.engine, None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        targets = resolve(read(slo), engine.config.slo)
        # In a thread: a new grammar takes milliseconds to compile, the first one a second.
        await asyncio.to_thread(engine.check, ids, params, targets)
        request_id = engine.submit(ids, params, on_output, priority=priority, slo=targets)
        try:
            while delta is None or delta.finish_reason is None:
                delta = await queue.get()
                yield delta
        finally:
            if delta is None or delta.finish_reason is None:
                engine.cancel(request_id)
