"""Reads generation_config.json: end tokens, and the sampling parameters that the model's authors recommend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.errors import ModelLoadError
from jaxspec.models.load.lazy_transformers import import_transformers

if TYPE_CHECKING:
    from transformers import GenerationConfig

#: Field of generation_config.json -> field of a request. vLLM takes the same ones, and like here not `do_sample`.
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """The folder's generation_config.json, or None. Raises `ModelLoadError` if it is not valid."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    transformers = import_transformers()
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of a temperature together with `do_sample: false`
    try:
        return transformers.GenerationConfig.from_pretrained(str(folder.absolute()), local_files_only=True)
    except Exception as e:  # transformers raises many types
        reason = " ".join(str(e).split())[:300]
        raise ModelLoadError(f"{path}: not a valid generation config ({type(e).__name__}: {reason})") from e
    finally:
        logging.set_verbosity(verbosity)


def sampling_of(config: GenerationConfig) -> dict[str, Any]:
    """The sampling parameters that the file sets, by the names of `SamplingParams`. The values are not checked."""
    given = {field: getattr(config, key, None) for key, field in _SAMPLING.items()}
    return {field: value for field, value in given.items() if value is not None}
