"""Export a GGUF file to a Hugging Face folder: python export_hf.py FILE.gguf FOLDER DTYPE (of the weights).

Runs as a script in a peer's environment, which has torch and transformers but not jaxspec.
"""

from __future__ import annotations

import os
import sys

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def export(file: str, folder: str, dtype: str) -> None:
    source, name = os.path.split(os.path.abspath(file))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        dtype=getattr(torch, dtype),
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    # transformers' server cannot ignore the end-of-sequence token. Without one, all answers have max_tokens.
    model.config.eos_token_id = None
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)


if __name__ == "__main__":
    export(*sys.argv[1:])
