"""From the configuration to a prediction service."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.errors import ModelLoadError
from jaxspec.extras import install_hint
from jaxspec.models.load import LoadedModel
from jaxspec.paths import cache_folder
from jaxspec.predict import shipped
from jaxspec.predict.index import LengthIndex
from jaxspec.predict.predictor import LengthPredictor
from jaxspec.predict.retrieval import RetrievalPredictor
from jaxspec.predict.service import PredictionService

#: The predictor that comes with the package for a model, by the model's name.
DEFAULT = {"smollm2-135m": "smollm2-length"}


def build(
    config: EngineConfig, model: LoadedModel, clock: Callable[[], float], proxy: LengthPredictor | None = None
) -> PredictionService | None:
    """A service that is neither warm nor started; None where the configuration names no predictor that reads texts.

    `proxy` may be passed already loaded. Raises `ConfigError` naming the setting that does not work.
    """
    if config.predictor not in ("auto", "proxy", "retrieval"):
        return None
    if config.predictor == "auto" and not (proxy or config.predictor_model or DEFAULT.get(model.name) in shipped()):
        return None
    predictor = proxy or load_proxy(config.predictor_model, model.name)
    if config.predictor == "retrieval":
        predictor = _retrieval(config, predictor, model.name)
    return PredictionService(predictor, lambda ids: model.tokenizer.decode(ids, skip_special_tokens=True), clock)


def load_proxy(name: str | None, model: str) -> LengthPredictor:
    """A trained predictor: one that comes with the package, by name, or a file; None: the one made for the model.

    Raises `ConfigError`.
    """
    from jaxspec.predict.proxy import ProxyPredictor

    own = shipped()
    if name is None and (name := DEFAULT.get(model)) not in own:
        raise ConfigError(
            f"predictor_model: no length predictor comes with the package for {model}; name one of another model "
            f"({', '.join(own)}) or a file made by python -m jaxspec.train_predictor, or set predictor: none, and "
            "requests count as their max_tokens"
        )
    assert name is not None
    try:
        return ProxyPredictor.load(own.get(name) or Path(name).expanduser())
    except (ModelLoadError, OSError) as error:
        known = f" (predictors by name: {', '.join(own)})" if own else ""
        raise ConfigError(f"predictor_model: {error}{known}") from None


def _retrieval(config: EngineConfig, proxy: LengthPredictor, model: str) -> RetrievalPredictor:
    settings = config.retrieval
    path: Path | None = None
    if settings.path is None:
        # Lengths are one model's, embeddings one encoder's; names say neither for certain.
        source = Path(config.model).expanduser()
        where = str(source.resolve()) if source.exists() else config.model
        told = hashlib.sha256(f"{where} {proxy.digest}".encode()).hexdigest()[:12]
        path = cache_folder("retrieval") / (re.sub(r"[^\w.-]+", "_", f"{model}-{proxy.name}-{told}") + ".safetensors")
    elif settings.path:
        path = Path(settings.path).expanduser()
        if path.is_dir():
            raise ConfigError(f"retrieval.path: {path} is a folder; name the file in it")
    try:
        index = LengthIndex(settings.k, settings.threshold, settings.capacity)
    except ImportError as error:
        raise ConfigError(
            f"predictor: retrieval needs FAISS, which is not installed ({error}): {install_hint('retrieval')}"
        ) from None
    return RetrievalPredictor(proxy, index, model, path)
