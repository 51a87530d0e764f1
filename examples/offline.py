"""Generate for several prompts without a server, and print where the time went.

    python examples/offline.py
    python examples/offline.py --model path/to/folder --set order=las --set draft=ngram

Models are named as for the server: `smollm2-135m`, a Hugging Face folder, a GGUF file or a hub id.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from jaxspec import LLM, SamplingParams
from jaxspec.config import parse_overrides

PROMPTS = ["The capital of Portugal is", "Once upon a time", "One, two, three, four,", "def fibonacci(n):"]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Generate for several prompts without a server.")
    parser.add_argument("--model", default="smollm2-135m", help="the model to run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting, as for the server")
    args = parser.parse_args(argv)

    # One per prompt, or one for all. With a seed a text is the same alone, in a batch, and with any drafter.
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=48) for i in range(len(PROMPTS))]

    # Settings (docs/configuration.md) are keywords. Two slots for four prompts, so that two of them have to wait; and
    # everything is compiled before the first request. A server compiles most of it in the background.
    settings = {"max_num_seqs": 2, "compile_in_background": False, **parse_overrides(args.set)}
    with LLM(model=args.model, **settings) as llm:
        begin = time.perf_counter()
        outputs = llm.generate(PROMPTS, params)
        seconds = time.perf_counter() - begin

    for output in outputs:
        metrics, completion = output.metrics, output.outputs[0]
        assert metrics.first_scheduled is not None  # None only for a request that was aborted while it waited
        print(f"\n{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")
        print(
            f"    {metrics.output_tokens} tokens in {metrics.e2e:.2f} s, of which "
            f"{metrics.first_scheduled - metrics.arrival:.2f} s in the queue; first token after {metrics.ttft:.2f} s"
        )
        # Tokens per verification: accepted draft tokens, and the one that the target adds. 1.00: no drafts, or none
        # accepted. `tree: auto` drafts only where that is expected to be faster.
        print(f"    mean accepted length {metrics.speculation.mean_accepted_length:.2f}")
    tokens = sum(output.metrics.output_tokens for output in outputs)
    print(f"\n{tokens} tokens, {tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main(sys.argv[1:])
