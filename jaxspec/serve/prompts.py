"""Converts the prompts of a request (text, token ids or chat messages) to token ids and checks their length."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxspec.chat.prompt import render
from jaxspec.serve.errors import ApiError
from jaxspec.serve.messages import ChatTemplateFields, Message
from jaxspec.serve.protocol import GenerationRequest

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer

#: Characters; longer texts are encoded in a thread so that they do not block the event loop.
_LONG_TEXT = 16_384
#: How many times as long as the context a prompt may be that is then truncated.
_TRUNCATED = 4


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    if len(text) > _LONG_TEXT:
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
    return tokenizer.encode(text, add_special_tokens)


def check_text(tokenizer: Tokenizer, text: str, tokens: int, field: str) -> None:
    """Raises `ApiError` (400) for a text that has more than this many tokens by its length alone: encoding it would
    take seconds."""
    if len(text) > _LONG_TEXT and len(text) > (most := tokenizer.longest_token * tokens):
        message = f"{field} has a text of {len(text):,} characters; {most:,} are the most for {tokens:,} tokens"
        raise ApiError(400, message, param=field, code="context_length_exceeded")


def most_tokens(body: GenerationRequest, max_model_len: int) -> int:
    """Tokens that a prompt may have before it is truncated."""
    return max_model_len if body.truncate_prompt_tokens is None else _TRUNCATED * max_model_len


async def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str] | Sequence[list[int]], add_special_tokens: bool, most: int
) -> list[list[int]]:
    """Token ids of each prompt. Raises `ApiError` if a prompt is empty, or by its length above `most` tokens."""
    if not prompts:
        raise ApiError(400, "prompt must not be empty", param="prompt", code="empty_prompt")
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text(tokenizer, prompt, most, "prompt")

    def encoded() -> list[list[int]]:
        return [tokenizer.encode(p, add_special_tokens) if isinstance(p, str) else p for p in prompts]

    long = sum(len(p) for p in prompts if isinstance(p, str)) > _LONG_TEXT
    ids = await asyncio.to_thread(encoded) if long else encoded()
    if not all(ids):
        raise ApiError(400, "every prompt must have at least one token", param="prompt", code="empty_prompt")
    return ids


class ChatPrompt(NamedTuple):
    """A conversation in the model's chat template, as text and as token ids."""

    text: str
    ids: list[int]


async def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    form: ChatTemplateFields,
    tools: Sequence[dict[str, Any]],
    add_special_tokens: bool,
    most: int,
) -> ChatPrompt:
    """The messages in the model's chat template, by default with the generation prompt of the assistant.

    Raises `ApiError` if the model has no template, the template rejects the messages, or the result is empty or by its
    length has more than `most` tokens.
    """
    if form.continue_final_message and messages[-1].role != "assistant":
        message = "continue_final_message needs a last message of the assistant"
        raise ApiError(400, message, param="continue_final_message")
    if not tokenizer.has_chat_template:
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
    try:
        text = render(tokenizer, [m.as_template() for m in messages], tools, form.template_variables)
    except ValueError as e:
        raise ApiError(400, str(e), param="messages", code="chat_template_error") from e
    check_text(tokenizer, text, most, "messages")
    ids = await encode(tokenizer, text, add_special_tokens)
    if not ids:
        raise ApiError(400, "messages result in an empty prompt", param="messages", code="empty_prompt")
    return ChatPrompt(text, ids)


def truncate(prompt: list[int], body: GenerationRequest, max_model_len: int) -> list[int]:
    """The part of the prompt that `truncate_prompt_tokens` leaves. Raises `ApiError` if it leaves none."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == 0 or limit >= max_model_len:
        message = f"truncate_prompt_tokens must be -1, or from 1 to {max_model_len - 1}"
        raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid_value")
    if limit < 0:
        limit = max(1, max_model_len - (body.max_completion_tokens or body.max_tokens or 1))
    return prompt[:limit] if body.truncation_side == "right" else prompt[-limit:]


def resolve_max_tokens(
    prompt: Sequence[int],
    max_tokens: int | None,
    max_model_len: int,
    field: str,
    length_field: str,
    default: int | None = None,
) -> int:
    """`max_tokens`, or if None, the number of tokens that fit into the context after `prompt`, at most `default`.

    `field` and `length_field` are the request fields of the prompt and of `max_tokens`. Raises `ApiError` (400) if
    prompt and output exceed `max_model_len`.
    """
    free = max_model_len - len(prompt)
    requested = 1 if max_tokens is None else max_tokens
    if requested > free:
        raise ApiError(
            400,
            f"this model's maximum context length is {max_model_len} tokens; the request needs "
            f"{len(prompt) + requested} ({len(prompt)} in the {field}, {requested} in the completion)",
            param=field if free < 1 else length_field,
            code="context_length_exceeded",
        )
    if max_tokens is not None:
        return max_tokens
    return free if default is None else min(free, default)
