"""The sampling parameters of requests that do not set them: those that the model's authors recommend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from jaxspec.errors import InvalidRequest, ModelLoadError
from jaxspec.models.load import LoadedModel
from jaxspec.sampling_params import SamplingParams

_WHOLE_NUMBERS = frozenset({"top_k", "max_tokens"})


def with_defaults(model: LoadedModel, source: Literal["auto", "none"]) -> LoadedModel:
    """The model with the `sampling` that `generation_config` asks for. Raises `ModelLoadError` for invalid values."""
    if source == "none":
        return replace(model, sampling={})
    for name, value in model.sampling.items():
        try:
            if type(value) is not int and (type(value) is not float or name in _WHOLE_NUMBERS):
                raise InvalidRequest(name, f"{name} must be a number, got {value!r}")
            alone: dict[str, Any] = {name: value}
            SamplingParams(**alone)
        except InvalidRequest as error:
            remedy = "correct the file, or set generation_config: none"
            raise ModelLoadError(f"generation_config.json of {model.name}: {error}; {remedy}") from None
    return model
