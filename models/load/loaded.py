"""A loaded model, and the header of a built-in one in the cache folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.models.config import DecoderConfig, Experts, RopeScaling
from jaxspec.models.load.files import replacing
from jaxspec.models.load.gguf_tensors import TensorInfo
from jaxspec.models.load.tokenizer import Tokenizer
from jaxspec.models.load.weights import Weights

#: Version of the header's layout. Increase it when the content changes: older files are then written again.
_LAYOUT = 4


@dataclass(frozen=True)
class LoadedModel:
    """Configuration, weights and tokenizer of a model.

    `weights` as in `jaxspec.models.load`: of `load_model` a `LazyWeights`, but any mapping will do, also one of arrays
    on the device. `sampling`: the sampling parameters that the model's authors recommend, by the names of
    `SamplingParams`.
    """

    config: DecoderConfig
    weights: Weights
    tokenizer: Tokenizer
    name: str
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Header(NamedTuple):
    """What a GGUF file says before its tensors. The `gguf` package takes most of a second to read it."""

    config: DecoderConfig
    tokenizer: Tokenizer
    tensors: Mapping[str, TensorInfo]


def save_header(header: Header, path: Path, origin: str) -> None:
    """Write `header` atomically as JSON. `origin` identifies the GGUF file. Raises `OSError`."""
    content = {
        "layout": _LAYOUT,
        "origin": origin,
        "config": asdict(header.config),
        "tokenizer": header.tokenizer.to_json(),
        "tensors": {name: asdict(tensor) for name, tensor in header.tensors.items()},
    }
    with replacing(path) as file:
        file.write_text(json.dumps(content), encoding="utf-8")


def load_header(path: Path, origin: str) -> Header | None:
    """Read a file of `save_header`. Returns None if it is missing, damaged or has another origin."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content["layout"], content["origin"]) != (_LAYOUT, origin):
            return None
        config, scaling = content["config"], content["config"].pop("rope_scaling")
        experts = content["config"].pop("experts")
        for part in filter(None, (config, scaling)):
            part |= {key: tuple(value) for key, value in part.items() if isinstance(value, list)}
        tensors = content["tensors"].items()
        return Header(
            DecoderConfig(
                **config, rope_scaling=scaling and RopeScaling(**scaling), experts=experts and Experts(**experts)
            ),
            Tokenizer.from_json(content["tokenizer"]),
            {name: TensorInfo(**tensor | {"shape": tuple(tensor["shape"])}) for name, tensor in tensors},
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None
