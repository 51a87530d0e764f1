"""The base of all request bodies, and types of their fields.

Types are strict ("1" is not a number, `true` is not an integer), NaN and infinities are rejected, and `null` means the
default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator, model_validator

from jaxspec.serve.errors import ApiError
from jaxspec.serve.unsupported import refuse_unsupported

logger = logging.getLogger("jaxspec.serve")

#: Unknown field names that are remembered and logged; bounded because clients choose the names.
_MAX_LOGGED = 64
_logged: set[str] = set()


def single_error(message: str) -> WrapValidator:
    """Report `message` for a union, instead of one error per branch."""

    def validate(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(validate)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
#: Most token ids of one field; no vocabulary is as large.
TokenIds = Annotated[list[TokenId], Field(max_length=2**19)]
#: Most prompts of a request that are looked at; the engine's limit may be lower.
MAX_PROMPTS = 4096


def _few_prompts(value: Any) -> Any:
    # Pydantic would try each kind of prompt on each of them.
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"must have at most {MAX_PROMPTS} prompts")
    return value


Prompt = Annotated[
    str | list[TokenId] | list[str] | list[list[TokenId]],
    single_error("must be a string, a list of strings, a list of token ids, or a list of lists of token ids"),
    BeforeValidator(_few_prompts),
]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=16)] | None,
    single_error("must be a string of 1 to 1000 characters, or a list of up to 16 such strings"),
]


#: Fields of OpenAI's API that change nothing about an answer.
_HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "prediction", "verbosity", "prompt_cache_key",
        "prompt_cache_retention", "safety_identifier", "parallel_tool_calls", "guided_decoding_backend",
        "spaces_between_special_tokens", "session_id",
    }
)  # fmt: skip


#: Most levels of lists and objects in a body. Answers repeat parts of it, and orjson writes `_WRITTEN` levels.
MAX_DEPTH, _WRITTEN = 128, 254


def check_depth(value: Any) -> None:
    """Raises `ApiError` (400) if a body is nested too deeply. orjson finds out, in a fraction of Python's time."""
    for _ in range(_WRITTEN - MAX_DEPTH):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        message = f"the request body is nested more than {MAX_DEPTH} levels deep"
        raise ApiError(400, message, code="invalid_body") from None


class ApiModel(BaseModel):
    """Unknown fields are ignored, as in other servers of this API, and logged once. Those that constrain an answer are
    refused (`unsupported.py`)."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_unknown(self) -> ApiModel:
        refuse_unsupported(self.model_extra or {})
        for name in self.model_extra or ():
            if name not in _HARMLESS and name not in _logged and len(_logged) < _MAX_LOGGED:
                _logged.add(name)
                logger.warning("ignoring the unknown field %.64r of %s", name, type(self).__name__)
        return self


class StrictModel(ApiModel):
    """Unknown fields are refused: a misspelt constraint must not go unnoticed."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(ApiModel):
    include_usage: bool | None = None
    #: Whether every chunk has the usage so far.
    continuous_usage_stats: bool | None = None
