"""What can be named as a drafter: n-gram lookup, the target's first layers, a trained drafter, another model."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.llama import head_of
from jaxspec.models.load import LoadedModel, ModelLoadError, load_model
from jaxspec.models.load.drafter import load_drafter
from jaxspec.models.load.weights import Weights

log = logging.getLogger(__name__)

NGRAM, AUTO = "ngram", "auto"
_TRUNCATED = re.compile(r"truncated:(\d+)\Z")
#: Drafters that come with the package, by name.
SHIPPED = Path(__file__).parent / "trained"


#: The one of them that drafts best for a model, by the model's name.
DEFAULT = {"smollm2-135m": "smollm2-eagle"}


def load_all(names: Sequence[str], target: LoadedModel) -> dict[str, tuple[DecoderConfig, Weights] | None]:
    """What `load` gives for each drafter, None for n-gram lookup. `auto` stands for that and a shipped one, if it fits:
    a model may go by the name of another. Raises `ConfigError` for others that don't fit."""
    out: dict[str, tuple[DecoderConfig, Weights] | None] = {}
    for name in names:
        if name not in (AUTO, NGRAM):
            out[name] = load(name, target)
            continue
        out.setdefault(NGRAM, None)
        if name == AUTO and (own := DEFAULT.get(target.name)) is not None:
            try:
                out[own] = load(own, target)
            except ConfigError as error:
                log.warning("drafting without %s: %s", own, error)
    return out


def shipped() -> list[str]:
    """Names of the drafters that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.safetensors"))


def load(name: str, target: LoadedModel) -> tuple[DecoderConfig, Weights]:
    """Configuration and weights (see `jaxspec.models.draft`) of a drafter that is a model.

    `truncated:K`, a name of `shipped()`, a `.safetensors` file of `jaxspec.distill`, or any model `load_model` takes
    that has the target's tokenizer. Raises `ConfigError` with the reason if it does not fit the target.
    """
    if match := _TRUNCATED.match(name):
        return truncated(target, int(match[1]))
    path = SHIPPED / f"{name}.safetensors" if name in shipped() else Path(name)
    try:
        if path.suffix == ".safetensors":
            return load_drafter(path, target.config, dict(target.weights))
        other = load_model(name)
    except ModelLoadError as error:
        known = f"{NGRAM}, truncated:K, {', '.join(shipped())}" if shipped() else f"{NGRAM}, truncated:K"
        raise ConfigError(f"draft: {error} (drafters by name: {known})") from None
    if other.config.vocab_size != target.config.vocab_size or not same_tokenizer(other, target):
        raise ConfigError(f"draft: {name} has another tokenizer than {target.name}: its tokens mean something else")
    return other.config, whole(other)


def truncated(target: LoadedModel, layers: int) -> tuple[DecoderConfig, Weights]:
    """The target's first layers with its own norm and head."""
    c = target.config
    if not 1 <= layers < c.num_layers:
        raise ConfigError(
            f"draft: truncated:{layers} must keep between 1 and {c.num_layers - 1} layers of {target.name}"
        )
    kept = {f"layers.{i}" for i in range(layers)}
    weights = {k: v for k, v in whole(target).items() if not k.startswith("layers.") or k.rsplit(".", 1)[0] in kept}
    windowed = tuple(i for i in c.windowed_layers if i < layers)
    if c.windowed_layers and not windowed:
        c = replace(c, sliding_window=None)
    return replace(c, num_layers=layers, windowed_layers=windowed), weights


def whole(model: LoadedModel) -> Weights:
    """A model's weights as a drafter's, over its whole vocabulary."""
    return {
        **model.weights,
        "head": head_of(model.config, model.weights),
        "vocab": np.arange(model.config.vocab_size, dtype=np.int32),
    }


def same_tokenizer(a: LoadedModel, b: LoadedModel) -> bool:
    """Whether both cut and number text alike, judged by what they make of text with a bit of everything."""
    probe = "The quick brown fox, naïve café №1: 3.14159 + x_2 == {\n\t'y': [1, 2]}  你好 \U0001f600 don't <|im_start|>"
    return a.tokenizer.encode(probe) == b.tokenizer.encode(probe)
