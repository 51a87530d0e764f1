"""Request bodies as pydantic models: OpenAI's fields and jaxspec's extensions, and their `SamplingParams`.

`SamplingParams` checks the ranges of its own fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from jaxspec.sampling_params import MAX_BAD_WORDS, MAX_LOGPROBS, SamplingParams
from jaxspec.serve.errors import ApiError, bad_request
from jaxspec.serve.fields import ApiModel, Prompt, Stop, StopString, StreamOptions, TokenId, TokenIds
from jaxspec.serve.messages import MAX_MESSAGES, ChatTemplateFields, Message, ReasoningFields
from jaxspec.serve.structure import StructureFields
from jaxspec.serve.tool_fields import ToolFields
from jaxspec.slo import RequestSlo

#: Most entries of fields that no client needs more of.
MAX_STOP_IDS, MAX_BIASED = 4096, 2**16


class GenerationRequest(StructureFields):
    """Fields common to completions and chat completions."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Stop = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASED)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    # Extensions of OpenAI's API.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: int | None = None
    #: How many last tokens of the prompt are used; -1: what fits. The first ones with `truncation_side` "right".
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    #: Whether the response has the token ids of prompt and outputs.
    return_token_ids: bool | None = None
    #: Whether log-probabilities name tokens by id, as `token_id:123`.
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    #: Unknown fields in `slo` are rejected, unlike elsewhere: a misspelt target must not go unnoticed.
    slo: RequestSlo | None = None
    #: Whether the response's `metrics` include `predicted_tokens`.
    return_predicted_tokens: bool | None = None
    #: Whether a stream has a chunk for each token, whose choice says with `draft` whether it was an accepted draft.
    return_accepted_drafts: bool | None = None

    @model_validator(mode="after")
    def _options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only allowed with stream: true", param="stream_options")
        if self.return_accepted_drafts and not self.stream:
            message = "return_accepted_drafts is only allowed with stream: true"
            raise ApiError(400, message, param="return_accepted_drafts")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        """Whether every chunk of the stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def length_field(self) -> str:
        """The field that limits the output length."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The request's `SamplingParams`; `max_tokens` is None if the request has no limit. Raises `ApiError`.

        `defaults`: values of fields that the request does not set, without regard to `max_tokens`.
        """
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        given = {name: value for name, value in defaults.items() if name != "max_tokens"} | given
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        with bad_request():
            given |= {"structured_outputs": self.structure(), **self._route_sampling()}
            return SamplingParams(**{"max_tokens": None, **given})

    def _route_sampling(self) -> dict[str, Any]:
        """Sampling parameters whose fields differ between the routes."""
        return {}


#: Fields with the same name and meaning in `SamplingParams`.
_SAMPLING = SamplingParams.__dataclass_fields__.keys() - {
    "logit_bias", "logprobs", "prompt_logprobs", "structured_outputs", "reasoning", "thinking_token_budget"
}  # fmt: skip


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
        limited = self.max_tokens is not None or self.max_completion_tokens is not None
        tokens = {"max_tokens": 1} if self.only_scores else {} if limited else {"max_tokens": 16}
        of_prompt = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        return {**tokens, "logprobs": self.logprobs, "prompt_logprobs": of_prompt}


class ChatRequest(GenerationRequest, ChatTemplateFields, ReasoningFields, ToolFields):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        return self

    def _route_sampling(self) -> dict[str, Any]:
        return {
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None, "prompt_logprobs": self.prompt_logprobs,
            "thinking_token_budget": self.thinking_token_budget,
        }  # fmt: skip


class TokenizeRequest(ChatTemplateFields, ToolFields):
    """Body of `/tokenize`: either `prompt` or `messages`. `add_special_tokens` applies to `prompt` only."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _either_prompt_or_messages(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "exactly one of prompt and messages is required", param="prompt")
        return self


class DetokenizeRequest(ApiModel):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=2**20)]


def _token_id(key: str) -> int:
    if key.isascii() and key.isdigit() and len(key) < 10:
        return int(key)
    raise ApiError(400, f"logit_bias: {key[:20]!r} is not a token id", param="logit_bias", code="invalid_value")
