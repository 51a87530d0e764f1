"""The jaxspec worker: `LLM.generate`, greedy."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from jaxspec.bench.peers.turns import Answer, pin, take_turns


def make(settings: dict[str, Any]) -> Answer:
    """`settings`: `model` (name or path), `threads`, and `overrides` of the config.

    Prefix caching is off because every turn has the same prompts and the peer recomputes them.
    """
    pin(settings["threads"])
    from jaxspec.bench.options import COMPILE_ALL_FIRST
    from jaxspec.llm import LLM
    from jaxspec.models.load.tokenizer import chat_ids
    from jaxspec.sampling_params import SamplingParams

    chosen = {**COMPILE_ALL_FIRST, "enable_prefix_caching": False, "draft": [], **settings["overrides"]}
    llm = LLM(model=settings["model"], show_progress=True, **chosen)

    def answer(turn: dict[str, Any]) -> dict[str, Any]:
        if texts := turn.get("encode"):
            return {"ids": [chat_ids(llm.engine.tokenizer, text) for text in texts]}
        params = SamplingParams(temperature=0.0, max_tokens=turn["max_tokens"], ignore_eos=True)
        llm.engine.reset_stats()
        begin = time.perf_counter()
        outputs = llm.generate(turn["prompts"], params)
        seconds = time.perf_counter() - begin
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return {"seconds": seconds, "tokens": tokens, "stats": asdict(llm.engine.stats())}

    return answer


if __name__ == "__main__":
    take_turns(make)
