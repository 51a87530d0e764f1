"""The transformers worker: `generate` on torch, greedy, float32, batches padded on the left."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

# Runs as a script by a Python without jaxspec, so turns.py is imported from the script's folder.
from turns import Answer, pin, take_turns  # pyright: ignore[reportMissingImports]


def make(settings: dict[str, Any]) -> Answer:
    """`settings`: `path` of a .gguf file or a Hugging Face directory, and `threads`."""
    pin(settings["threads"])
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(settings["threads"])
    transformers.logging.set_verbosity_error()
    folder, file = settings["path"], None
    if os.path.isfile(folder):
        folder, file = os.path.split(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    # Without an end-of-sequence token every request generates max_new_tokens, without extra cost per step.
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    def answer(turn: dict[str, Any]) -> dict[str, Any]:
        prompts: list[list[int]] = turn["prompts"]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=turn["max_tokens"])
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "tokens": out[:, width:].tolist()}

    print(f"transformers {transformers.__version__}, torch {torch.__version__}", file=sys.stderr)
    return answer


if __name__ == "__main__":
    take_turns(make)
