"""Loading an encoder of BERT's architecture: a built-in name or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from jaxspec.models.bert import BertConfig, BertEncoder


@dataclass(frozen=True)
class LoadedEncoder:
    config: BertConfig
    encoder: BertEncoder
    tokenizer: Tokenizer


def load_bert(source: str | Path, layers: int | None = None) -> LoadedEncoder:
    """`source`: "all-minilm-l6-v2", or a folder with config.json, model.safetensors, and tokenizer.json or vocab.txt.

    `layers`: keep only the first so many. Raises `ModelLoadError` naming what is wrong.
    """
    raise NotImplementedError
