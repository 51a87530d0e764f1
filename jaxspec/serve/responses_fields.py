"""The body of `/v1/responses`, and the chat request that it stands for. Nothing is stored between requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, WrapValidator, model_validator

from jaxspec.serve.errors import ApiError, field_of, invalid_field
from jaxspec.serve.fields import ApiModel, StrictModel, single_error
from jaxspec.serve.messages import MAX_MESSAGES, ChatTemplateFields, ReasoningFields, text_of
from jaxspec.serve.protocol import ChatRequest, GenerationRequest
from jaxspec.serve.tool_fields import MAX_TOOLS, FunctionField

_STATELESS = "responses are not stored; send the whole conversation in input"


class _Part(ApiModel):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""


_Parts = Annotated[list[_Part], Field(max_length=MAX_MESSAGES)]
_Content = Annotated[str | _Parts | None, single_error("must be a string or a list of text parts")]


class InputItem(ApiModel):
    """A message, a function call, its output, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Content = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: _Content = None
    summary: list[_Part] | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> InputItem:
        needed = {
            "message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"), "reasoning": (),
        }[self.type]  # fmt: skip
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(f"needs {' and '.join(missing)}")
        return self


class _OfFunction(ApiModel):
    type: Literal["function"]


class FunctionTool(FunctionField, _OfFunction):
    """A function, whose type is checked first: other tools have no name."""


class _TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    description: str | None = None


class _Text(StrictModel):
    format: _TextFormat | None = None
    verbosity: str | None = None


class _Reasoning(ApiModel):
    effort: str | None = None
    summary: str | None = None


def _items(value: Any, inner: Callable[[Any], Any]) -> Any:
    """Report the first item that is wrong, and not also that a list is no string."""
    try:
        return inner(value)
    except ValidationError as e:
        wrong = next((e for e in e.errors() if len(e["loc"]) > 1 and isinstance(e["loc"][1], int)), None)
        if wrong is None and any(e["type"] == "too_long" for e in e.errors()):
            raise ValueError(f"must have at most {MAX_MESSAGES} items") from None
        if wrong is None:
            raise ValueError("must be a string, or a list of messages and function calls") from None
        reason = str(wrong["msg"]).removeprefix("Value error, ")
        raise ValueError(f"{field_of(wrong['loc'][1:])}: {reason}") from None


class ResponsesRequest(GenerationRequest, ChatTemplateFields, ReasoningFields):
    """Besides OpenAI's fields it has those of chat completions that only jaxspec and vLLM have, such as `slo`."""

    input: Annotated[str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)], WrapValidator(_items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None

    # Refused: what needs a store, or work after the response.
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None

    @model_validator(mode="after")
    def _is_stateless(self) -> ResponsesRequest:
        for name in ("previous_response_id", "conversation", "prompt", "background"):
            if getattr(self, name):
                message = f"{name} is not supported: {_STATELESS}"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        limits = ("max_output_tokens", "max_completion_tokens", "max_tokens")
        if len(given := [name for name in limits if getattr(self, name) is not None]) > 1:
            raise ApiError(400, f"{given[1]} and {given[0]} cannot both be given", param=given[1], code="invalid_value")
        if (self.n or 1) != 1:
            raise ApiError(400, "n must be 1", param="n", code="invalid_value")
        for name in ("prompt_logprobs", "return_token_ids", "return_accepted_drafts", "response_format"):
            if getattr(self, name):
                hint = "use text.format" if name == "response_format" else "use /v1/chat/completions"
                raise ApiError(400, f"{name} is not supported here: {hint}", param=name, code="unsupported_parameter")
        return self

    def as_chat(self) -> ChatRequest:
        """The chat request with the same meaning. Raises `ApiError`."""
        shared = (GenerationRequest, ChatTemplateFields, ReasoningFields)
        common = {name for model in shared for name in model.model_fields}
        fields = self.model_dump(by_alias=True, exclude_unset=True, include=common) | {"messages": self._messages()}
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.tools is not None:
            fields["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}
                for tool in self.tools
            ]
        if self.tool_choice is not None:
            fields["tool_choice"] = _as_chat_choice(self.tool_choice)
        if self.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.truncation == "auto" and self.truncate_prompt_tokens is None:
            fields["truncate_prompt_tokens"] = -1
        if self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ()):
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.text is not None and (form := self.text.format) is not None:
            schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
            fields["response_format"] = {"type": form.type, "json_schema": schema}
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as e:
            raise invalid_field(e.errors()[0], e.errors()[0]["loc"]) from None

    def _messages(self) -> list[dict[str, Any]]:
        """The input as chat messages: calls and reasoning belong to the message of the assistant around them."""
        out: list[dict[str, Any]] = []
        if self.instructions:
            out.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*out, {"role": "user", "content": self.input}]
        open_turn = False  # whether the last message is the assistant's, and its turn goes on
        for item in self.input:
            own = item.type in ("function_call", "reasoning") or item.role == "assistant"
            if own and not open_turn:
                out.append({"role": "assistant", "content": None})
            match item.type:
                case "message" if own:
                    out[-1]["content"] = "\n".join(filter(None, [out[-1]["content"], text_of(item.content)]))
                case "message":
                    out.append({"role": item.role, "content": text_of(item.content)})
                case "function_call":
                    function = {"name": item.name, "arguments": item.arguments}
                    out[-1].setdefault("tool_calls", []).append(
                        {"id": item.call_id, "type": "function", "function": function}
                    )
                case "function_call_output":
                    out.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
                case "reasoning":
                    thought = [out[-1].get("reasoning_content"), text_of(item.content) or text_of(item.summary)]
                    out[-1]["reasoning_content"] = "\n".join(filter(None, thought))
            open_turn = own
        return out


#: Field of a chat request -> the field of `/v1/responses` that it came from.
_ORIGINS = {"response_format": "text.format", "messages": "input", "max_completion_tokens": "max_output_tokens"}


@contextmanager
def naming_own_fields() -> Iterator[None]:
    """Errors about fields of the chat request name those of the responses request instead."""
    try:
        yield
    except ApiError as e:
        error = e.body["error"]
        if (own := _ORIGINS.get(error["param"])) is None:
            raise
        message = error["message"].replace(error["param"], own)
        raise ApiError(e.status_code, message, param=own, code=error["code"]) from None


def _as_chat_choice(choice: Any) -> Any:
    """The form that `tool_choice` has in chat completions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        given = choice.get("tools")
        tools = [_as_chat_choice(tool) for tool in given] if isinstance(given, list) else given
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice
