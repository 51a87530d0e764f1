"""Speculation on and off, through the whole engine: the scheduler, drafting, verification, and the host's work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jaxspec.bench.gpu.card import Card
from jaxspec.llm import LLM
from jaxspec.models.load import LoadedModel
from jaxspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer


class NumberTokenizer:
    """A tokenizer for a model without one: the text of a token is its number."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id = None
    special_ids: frozenset[int] = frozenset()
    has_chat_template = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{id} " for id in ids)

    def token_bytes(self, id: int) -> bytes:
        return f"{id} ".encode()

    def token_text(self, id: int) -> str:
        return f"{id} "


def generate(card: Card, draft: str) -> dict[str, Any]:
    """All requests at once, greedy, with this drafter ("none": no speculation). Random weights accept next to no
    draft, so the seconds of a step count here, not the tokens per second."""
    requests, prompt, answer = card.sizes.engine
    model = LoadedModel(
        card.config, cast("dict[str, np.ndarray]", card.weights(card.model)),
        cast("Tokenizer", NumberTokenizer(card.config.vocab_size)), card.model,
    )  # fmt: skip
    rng = np.random.default_rng(card.seed)
    prompts = [rng.integers(card.config.vocab_size, size=prompt).tolist() for _ in range(requests)]
    buckets = (requests, max(8 * requests, prompt))
    longest = prompt + answer + 32
    config = card.engine_config(
        buckets, requests, longest, card.dtype, draft=[] if draft == "none" else [draft],
        kv_cache_tokens=2 * requests * longest, compile_in_background=False, enable_prefix_caching=False,
        tree="chain", draft_depth=4,  # `auto` would soon stop drafting: next to none is accepted
    )  # fmt: skip
    begun = time.perf_counter()
    with LLM(model, **config.model_dump(exclude_defaults=True)) as llm:
        built = time.perf_counter() - begun
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        llm.generate(prompts, params)  # not counted
        llm.engine.reset_stats()
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds, stats = time.perf_counter() - begun, llm.engine.stats()
        layers = llm.engine.loop.model_runner.layers.name
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "draft": draft, "requests": requests, "prompt": prompt, "answer": answer, "layers": layers, "build_s": built,
        "tokens_per_s": tokens / seconds, "steps": stats.steps, "step_ms": 1e3 * stats.step_seconds / stats.steps,
        "host_share": stats.host_seconds / stats.step_seconds if stats.step_seconds else None,
        "acceptance": stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else None,
    }  # fmt: skip
