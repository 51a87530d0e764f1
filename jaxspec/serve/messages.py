"""Chat messages, and how they become a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, ValidationInfo, field_validator, model_validator

from jaxspec.serve.errors import ApiError
from jaxspec.serve.fields import ApiModel, single_error

#: Most messages of a conversation, parts of a message, and documents.
MAX_MESSAGES = 10_000


class TextPart(ApiModel):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class CalledFunction(ApiModel):
    name: str
    arguments: str = "{}"


class ToolCall(ApiModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class _Part(Protocol):
    text: str
    refusal: str


def text_of(content: str | Sequence[_Part] | None) -> str:
    """The content of a message as one string."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal for part in content)


class Message(ApiModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    #: Calls that an answer of the assistant made.
    tool_calls: list[ToolCall] | None = None
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None,
        single_error("must be a string or a list of text parts"),
        Field(validate_default=True),
    ] = None  # fmt: skip
    name: str | None = None
    #: The call that a message of a tool answers.
    tool_call_id: str | None = None
    #: Reasoning of an answer; chat templates decide whether it is shown.
    reasoning_content: str | None = None
    reasoning: str | None = None

    @field_validator("content")
    @classmethod
    def _has_content(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role") != "assistant":
            raise ValueError("is required")
        return value

    @model_validator(mode="after")
    def _calls_of_assistant(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the assistant")
        return self

    def as_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content as one string, role "developer" as "system"."""
        optional = {
            "name": self.name, "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [call.model_dump(exclude_none=True) for call in self.tool_calls or ()] or None,
        }  # fmt: skip
        role = "system" if self.role == "developer" else self.role
        return {
            "role": role,
            "content": text_of(self.content),
            **{name: v for name, v in optional.items() if v is not None},
        }


class ReasoningFields(ApiModel):
    #: Tokens of reasoning after which it must end.
    thinking_token_budget: int | None = None
    #: Whether the response has the answer's reasoning.
    include_reasoning: bool | None = None
    #: Whether it has it in a field of its own, and not as content with tags.
    separate_reasoning: bool | None = None


#: Variables of chat templates that have fields of their own, and Python's name for an object.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "self"})


class ChatTemplateFields(ApiModel):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None
    #: The answer continues the last message, which is the assistant's.
    continue_final_message: bool | None = None
    #: Variables of the model's chat template, such as `enable_thinking`.
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _continues_or_begins(self) -> ChatTemplateFields:
        if reserved := _RESERVED & (self.chat_template_kwargs or {}).keys():
            message = f"chat_template_kwargs must not set {', '.join(sorted(reserved))}"
            raise ApiError(400, message, param="chat_template_kwargs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt cannot both be true"
            raise ApiError(400, message, param="continue_final_message")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """Keyword arguments of `Tokenizer.apply_chat_template`."""
        continues = bool(self.continue_final_message)
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        given = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        return {
            **{name: value for name, value in given.items() if value is not None}, **(self.chat_template_kwargs or {}),
            "add_generation_prompt": begins, "continue_final_message": continues,
        }  # fmt: skip
