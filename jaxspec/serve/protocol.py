"""What a client may send: OpenAI's fields and jaxspec's own, as pydantic models, and the sampling they ask for.

Types are strict (the string "1" is no number, `true` is no integer), NaN and infinities are refused, and `null` means
the default. Ranges that `SamplingParams` checks are not repeated here.
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

#: So many different unknown fields are logged; the names come from clients, who don't get to fill the memory.
_MAX_LOGGED = 64
_logged: set[str] = set()


def _instead(message: str) -> WrapValidator:
    """One message for a union, in place of one error for each of its branches."""

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
    _instead("must be a string, a list of strings, a list of token ids, or a list of such lists"),
]
Stop = Annotated[
    StopString | list[StopString] | None, _instead("must be a string of 1 to 1000 characters, or a list of them")
]


class _Lenient(BaseModel):
    """Fields that are not known are ignored, as other servers of this API do, and logged once."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _tell_unknown(self) -> _Lenient:
        for name in self.model_extra or ():
            if name not in _logged and len(_logged) < _MAX_LOGGED:
                _logged.add(name)
                logger.warning("ignoring the unknown field %.64r of %s", name, type(self).__name__)
        return self


class StreamOptions(_Lenient):
    include_usage: bool | None = None


class GenerationRequest(_Lenient):
    """What completions and chat have in common."""

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

    # Not OpenAI's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    #: Unlike elsewhere unknown fields in here are refused: a promise that was misspelt would not be kept.
    slo: RequestSlo | None = None
    #: Whether the answer's `metrics` are to say how many tokens were predicted.
    return_predicted_tokens: bool | None = None

    # Only their trivial values are served.
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
            raise ApiError(400, "stream_options is only allowed with stream", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def length_field(self) -> str:
        """The field that says how many tokens to generate."""
        return "max_tokens"

    def sampling(self) -> SamplingParams:
        """The sampling asked for, its `max_tokens` None where nothing was said. Raises `ApiError`."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        try:
            return SamplingParams(**{"max_tokens": None, **given, **self._own_sampling()})
        except InvalidRequest as e:
            raise ApiError(400, str(e), param=e.field, code="invalid_value") from e

    def _own_sampling(self) -> dict[str, Any]:
        return {}


#: Fields that mean the same here and there.
_SAMPLING = SamplingParams.__dataclass_fields__.keys() - {"logit_bias", "logprobs", "prompt_logprobs"}


class CompletionRequest(GenerationRequest):
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
            raise ValueError("inserting text before a suffix is not supported")
        return value

    @model_validator(mode="after")
    def _best_is_all(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of is only supported when it equals n", param="best_of")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always a list of prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return self.prompt  # pyright: ignore[reportReturnType]

    @property
    def only_scores(self) -> bool:
        """`max_tokens` 0 with `echo`: the client wants the prompt back, with its log-probabilities, and no more."""
        return self.max_tokens == 0 and bool(self.echo)

    def _own_sampling(self) -> dict[str, Any]:
        # The engine's least is one token, which is then left out.
        tokens = {"max_tokens": 1} if self.only_scores else {"max_tokens": 16} if self.max_tokens is None else {}
        return {**tokens, "logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}


class TextPart(_Lenient):
    type: Literal["text"]
    text: str


class Message(_Lenient):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart], _instead("must be a string or a list of text parts")]
    name: str | None = None


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is only allowed with logprobs", param="top_logprobs")
        return self

    @property
    def length_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def _own_sampling(self) -> dict[str, Any]:
        tokens = {} if self.max_completion_tokens is None else {"max_tokens": self.max_completion_tokens}
        return {**tokens, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}


class TokenizeRequest(_Lenient):
    """Either `prompt` or `messages`; special tokens are added to a plain prompt only."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(_Lenient):
    model: str | None = None
    tokens: list[TokenId]


def _token_id(key: str) -> int:
    if key.isascii() and key.isdigit() and len(key) < 10:
        return int(key)
    raise ApiError(400, f"logit_bias: {key[:20]!r} is no token id", param="logit_bias", code="invalid_value")
