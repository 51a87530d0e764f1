"""`AsyncLLM`: outputs arrive while the event loop does other things."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helpers import tiny
from helpers.serving import eventually
from jaxspec import AsyncLLM, InvalidRequest, SamplingParams

PROMPT = [5, 6, 7]


def test_requests_run_together_and_can_be_left() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    async def tokens(llm: AsyncLLM, prompt: list[int]) -> list[int]:
        return [token async for delta in llm.generate(prompt, greedy) for token in delta.token_ids]

    async def leave(llm: AsyncLLM) -> None:
        long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        async for _ in llm.generate(PROMPT, long):
            break

    async def main() -> None:
        sizes: dict[str, Any] = dict(
            max_num_seqs=4, token_buckets=[4, 16], max_num_batched_tokens=16, compilation_cache_dir=""
        )
        async with AsyncLLM(tiny.model(), draft=[], compile_in_background=False, **sizes) as llm:
            both = await asyncio.gather(tokens(llm, PROMPT), tokens(llm, [9]), leave(llm))
            assert both[:2] == [tiny.greedy(PROMPT, 12), tiny.greedy([9], 12)]
            await asyncio.to_thread(eventually, lambda: llm.engine.stats().running == 0)
            with pytest.raises(InvalidRequest, match="n must be 1"):
                await anext(llm.generate(PROMPT, SamplingParams(n=2)))

    asyncio.run(main())
