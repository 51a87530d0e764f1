r"""Serve a model of your own with speculative decoding that needs no training, and see which drafters pay.

    python examples/own_model.py path/to/folder               # Hugging Face: Llama, Mistral, Qwen2, Qwen3, SmolLM2
    python examples/own_model.py model.gguf --layers 4

What to train next, from prompts like those of your users (docs/train.md). Answers first, then a
drafter, which is usually far better than the model's own first layers, and a predictor of answer lengths, with which
short answers can go first:

    python -m jaxspec.train_predictor.collect --model path/to/folder --prompts prompts.jsonl
    python -m jaxspec.draft.distill --config configs/distill/eagle.yaml --set target=path/to/folder
    python -m jaxspec.train_predictor --config configs/predictor/length.yaml --set target=path/to/folder
    python -m jaxspec.serve --config configs/default.yaml --model path/to/folder --draft ngram \
        --draft trained/folder/folder-eagle.safetensors --set predictor_model=trained/folder/folder-length.safetensors
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from jaxspec import LLM, SamplingParams
from jaxspec.config import parse_overrides

ASKED = ("Name three rivers of Portugal.", "Write a function that reverses a list.", "What is 17 times 23?")
CONVERSATIONS = [[{"role": "user", "content": text}] for text in ASKED]
#: Without a predictor, an order by predicted length would have only max_tokens to go by. And everything is compiled
#: before the first request, as for any measurement; a server compiles most of it in the background.
SETTINGS = {"order": "fcfs", "predictor": "none", "compile_in_background": False}


def measure(model: str, draft: list[str], settings: dict[str, Any]) -> tuple[float, list[str]]:
    """Print the speed with these drafters; -> tokens per second, and the answers."""
    with LLM(model=model, draft=draft, **settings) as llm:
        begin = time.perf_counter()
        outputs = llm.chat(CONVERSATIONS, SamplingParams(temperature=0, max_tokens=64))
        seconds = time.perf_counter() - begin
    tokens = sum(output.metrics.output_tokens for output in outputs)
    length = fmean(output.metrics.speculation.mean_accepted_length for output in outputs)
    print(f"{' + '.join(draft) or 'no drafts':24} {tokens / seconds:7.1f} tokens/s, mean accepted length {length:.2f}")
    return tokens / seconds, [output.outputs[0].text for output in outputs]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Serve a model of your own with drafters that need no training.")
    parser.add_argument("model", help="Hugging Face folder or GGUF file")
    parser.add_argument("--layers", type=int, default=6, help="draft with the model's first layers, this many")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting, as for the server")
    args = parser.parse_args(argv)

    truncated = f"truncated:{args.layers}"
    settings = {**SETTINGS, **parse_overrides(args.set)}
    # n-gram lookup costs next to nothing. Whether drafting with the first layers pays, the engine decides in each step.
    contenders = [[], ["ngram"], ["ngram", truncated]]
    speeds, answers = zip(*(measure(args.model, draft, settings) for draft in contenders), strict=True)
    fastest = "".join(f" --draft {name}" for name in contenders[speeds.index(max(speeds))]) or " --draft none"
    print(f"\n{ASKED[0]} {answers[0][0]}")
    print(f"the same answers with and without drafts: {all(each == answers[0] for each in answers)}")
    print(f"\nTo serve it:  python -m jaxspec.serve --model {args.model}{fastest}")


if __name__ == "__main__":
    main(sys.argv[1:])
