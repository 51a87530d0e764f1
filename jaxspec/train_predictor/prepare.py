"""What a run begins with: the encoder, and the data as it reads them."""

from __future__ import annotations

from jaxspec.config import ConfigError
from jaxspec.models.load import load_model
from jaxspec.models.load.bert import LoadedEncoder, load_bert
from jaxspec.predict.text import clip
from jaxspec.train_predictor.config import PredictorConfig
from jaxspec.train_predictor.data import Corpus, corpus, read_rows


def prepare(config: PredictorConfig) -> tuple[LoadedEncoder, Corpus]:
    """Raises `ConfigError` naming the setting, and `ModelLoadError`."""
    # First what is here, then what may have to be downloaded.
    rows = read_rows(config.data, lambda: load_model(config.target).tokenizer, config.cap, config.limit)
    loaded = load_bert(config.encoder, config.layers)
    if config.longest > loaded.config.max_positions:
        raise ConfigError(f"longest: {config.encoder} reads {loaded.config.max_positions} tokens, not {config.longest}")
    return loaded, corpus(
        rows, lambda text: clip(loaded.tokenizer, text, config.longest), config.validation, config.test
    )
