"""Request bodies as pydantic models: OpenAI's fields and jaxspec's extensions, and their `SamplingParams`.

Types are strict ("1" is not a number, `true` is not an integer), NaN and infinities are rejected, and `null` means the
default. `SamplingParams` checks the ranges of its own fields.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, field_validator, model_validator

from jaxspec.sampling_params import MAX_LOGPROBS, InvalidRequest, SamplingParams
from jaxspec.serve.errors import ApiError
from jaxspec.slo import RequestSlo

logger = logging.getLogger("jaxspec.serve")

#: Unknown field names that are remembered and logged; bounded because clients choose the names.
_MAX_LOGGED = 64
_logged: set[str] = set()


def _single_error(message: str) -> WrapValidator:
    """Report `message` for a union, instead of one error per branch."""

    def validate(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(validate)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
Prompt = Annotated[
    str | list[TokenId] | list[str] | list[list[TokenId]],
    _single_error("must be a string, a list of strings, a list of token ids, or a list of lists of token ids"),
]
Stop = Annotated[
    StopString | list[StopString] | None,
    _single_error("must be a string of 1 to 1000 characters, or a list of such strings"),
]


class _ApiModel(BaseModel):
    """Unknown fields are ignored, as in other servers of this API, and logged once."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _log_unknown(self) -> _ApiModel:
        for name in self.model_extra or ():
            if name not in _logged and len(_logged) < _MAX_LOGGED:
                _logged.add(name)
                logger.warning("ignoring the unknown field %.64r of %s", name, type(self).__name__)
        return self


class StreamOptions(_ApiModel):
    include_usage: bool | None = None


class GenerationRequest(_ApiModel):
    """Fields common to completions and chat completions."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Stop = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    max_tokens: int | None = None

    # Extensions of OpenAI's API.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    #: Unknown fields in `slo` are rejected, unlike elsewhere: a misspelt target must not go unnoticed.
    slo: RequestSlo | None = None
    #: Whether the response's `metrics` include `predicted_tokens`.
    return_predicted_tokens: bool | None = None

    # Accepted only with values that change nothing.
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    @field_validator("response_format")
    @classmethod
    def _plain_text(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value != {"type": "text"}:
            raise ValueError('only {"type": "text"} is supported')
        return value

    @field_validator("tools", "tool_choice")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value not in (None, [], "none", "auto"):
            raise ValueError("tools are not supported")
        return value

    @model_validator(mode="after")
    def _options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only allowed with stream: true", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def length_field(self) -> str:
        """The field that limits the output length."""
        return "max_tokens"

    def sampling(self) -> SamplingParams:
        """The request's `SamplingParams`; `max_tokens` is None if the request has no limit. Raises `ApiError`."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        try:
            return SamplingParams(**{"max_tokens": None, **given, **self._route_sampling()})
        except InvalidRequest as e:
            raise ApiError(400, str(e), param=e.field, code="invalid_value") from e

    def _route_sampling(self) -> dict[str, Any]:
        """Sampling parameters whose fields differ between the routes."""
        return {}


#: Fields with the same name and meaning in `SamplingParams`.
_SAMPLING = SamplingParams.__dataclass_fields__.keys() - {"logit_bias", "logprobs", "prompt_logprobs"}


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Prompt
    max_tokens: int | None = 16
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("is not supported")
        return value

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of is only supported when it equals n", param="best_of")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list: texts, or lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return self.prompt  # pyright: ignore[reportReturnType]

    @property
    def only_scores(self) -> bool:
        """`max_tokens` 0 with `echo`: return only the prompt and its log-probabilities."""
        return self.max_tokens == 0 and bool(self.echo)

    def _route_sampling(self) -> dict[str, Any]:
        # The engine generates at least one token; the response omits it.
        tokens = {"max_tokens": 1} if self.only_scores else {"max_tokens": 16} if self.max_tokens is None else {}
        return {**tokens, "logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}


class TextPart(_ApiModel):
    type: Literal["text"]
    text: str


class Message(_ApiModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart], _single_error("must be a string or a list of text parts")]
    name: str | None = None


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        return self

    @property
    def length_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def _route_sampling(self) -> dict[str, Any]:
        tokens = {} if self.max_completion_tokens is None else {"max_tokens": self.max_completion_tokens}
        return {**tokens, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}


class TokenizeRequest(_ApiModel):
    """Body of `/tokenize`: either `prompt` or `messages`. `add_special_tokens` applies to `prompt` only."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _either_prompt_or_messages(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "exactly one of prompt and messages is required", param="prompt")
        return self


class DetokenizeRequest(_ApiModel):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


def _token_id(key: str) -> int:
    if key.isascii() and key.isdigit() and len(key) < 10:
        return int(key)
    raise ApiError(400, f"logit_bias: {key[:20]!r} is not a token id", param="logit_bias", code="invalid_value")
