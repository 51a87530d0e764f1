"""Builds the prediction service from the config."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.errors import ModelLoadError
from jaxspec.extras import install_hint
from jaxspec.models.load import LoadedModel
from jaxspec.paths import cache_folder
from jaxspec.predict import shipped
from jaxspec.predict.blend import BlendedPredictor
from jaxspec.predict.index import LengthIndex
from jaxspec.predict.predictor import LengthPredictor, TextEncoder
from jaxspec.predict.retrieval import RetrievalPredictor
from jaxspec.predict.service import NoPredictions, PredictionService
from jaxspec.predict.user_text import user_text
from jaxspec.sched.slots import PREDICTORS

#: Model's name -> the shipped predictor for it.
DEFAULT = {"smollm2-135m": "smollm2-length"}


def build(
    config: EngineConfig, model: LoadedModel, clock: Callable[[], float], loaded: LengthPredictor | None = None
) -> PredictionService | NoPredictions:
    """The prediction service, neither warmed up nor started, if the config names a predictor that reads prompts.

    `loaded` is used instead of loading a proxy. Raises `ConfigError` naming the setting that does not work.
    """
    reader = PREDICTORS.selected(config).reader
    predictor = resolve_name(reader)(config, model, loaded) if reader else None
    if predictor is None:
        return NoPredictions()
    return PredictionService(predictor, lambda ids: model.tokenizer.decode(ids, skip_special_tokens=True), clock)


def auto(config: EngineConfig, model: LoadedModel, loaded: LengthPredictor | None) -> LengthPredictor | None:
    """`predictor: auto`: the proxy, if one is given or ships with the package for the model."""
    known = loaded or config.predictor_model or DEFAULT.get(model.name) in shipped()
    return proxy(config, model, loaded) if known else None


def proxy(config: EngineConfig, model: LoadedModel, loaded: LengthPredictor | None) -> LengthPredictor:
    """`predictor: proxy`."""
    return loaded or load_proxy(config.predictor_model, model.name, kernels=config.kernels != "xla")


def load_proxy(name: str | None, model: str, kernels: bool = False) -> LengthPredictor:
    """A trained predictor: a shipped one by name, or a file. None: the shipped one for `model`. `kernels`: see
    `ProxyPredictor.load`.

    Raises `ConfigError` if there is none or it cannot be loaded.
    """
    from jaxspec.predict.proxy import ProxyPredictor

    files = shipped()
    if name is None and (name := DEFAULT.get(model)) not in files:
        raise ConfigError(
            f"predictor_model: no length predictor ships with the package for {model}; set another model's "
            f"({', '.join(files)}) or a file made by python -m jaxspec.train_predictor, or set predictor: none, which "
            "takes max_tokens for a request's length"
        )
    assert name is not None
    try:
        return ProxyPredictor.load(files.get(name) or Path(name).expanduser(), kernels)
    except (ModelLoadError, OSError) as error:
        known = f" (predictors by name: {', '.join(files)})" if files else ""
        raise ConfigError(f"predictor_model: {error}{known}") from None


def load_encoder(source: str) -> TextEncoder:
    """The encoder of `predictor: retrieval`. Raises `ConfigError` if it cannot be downloaded or loaded."""
    from jaxspec.predict.sentence_encoder import SentenceEncoder

    try:
        return SentenceEncoder.load(source)
    except (ModelLoadError, OSError) as error:
        raise ConfigError(f"retrieval.encoder: {error}") from None


def retrieval(config: EngineConfig, model: LoadedModel, loaded: LengthPredictor | None) -> LengthPredictor:
    """`predictor: retrieval`: a pre-trained encoder, and the proxy for prompts that are like no other."""
    settings = PREDICTORS.section_of(config)
    path: Path | None = None
    if settings.path is None:
        # Lengths belong to one model and embeddings to one encoder. Their names may be ambiguous, hence the digest.
        digest = hashlib.sha256(f"{_where(config.model)} {_where(settings.encoder)}".encode()).hexdigest()[:12]
        stem = f"{model.name}-{Path(settings.encoder).name}-{digest}"
        path = cache_folder("retrieval") / (re.sub(r"[^\w.-]+", "_", stem) + ".safetensors")
    elif settings.path:
        path = Path(settings.path).expanduser()
        if path.is_dir():
            raise ConfigError(f"retrieval.path: {path} is a folder; set a file in it")
    try:
        index = LengthIndex(settings.k, settings.threshold, settings.capacity)
    except ImportError as error:
        raise ConfigError(
            f"predictor: retrieval needs FAISS, which is not installed ({error}): {install_hint('retrieval')}"
        ) from None
    encoder = load_encoder(settings.encoder)
    kind = BlendedPredictor if settings.blend else RetrievalPredictor
    return kind(proxy(config, model, loaded), encoder, index, model.name, path, user_text(model.tokenizer))


def _where(source: str) -> str:
    """A model's name, or the full path of its folder or file."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source
