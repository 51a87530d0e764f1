"""What a client sent as a prompt, text or token ids or a conversation, as checked token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxspec.serve.errors import ApiError
from jaxspec.serve.protocol import Message, TextPart

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer

#: Longer texts are encoded in a thread, so that the event loop goes on serving the streams meanwhile.
_LONG_TEXT = 16_384


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    if len(text) > _LONG_TEXT:
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
    return tokenizer.encode(text, add_special_tokens)


async def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str] | Sequence[list[int]]) -> list[list[int]]:
    """Token ids of each prompt, none of them empty."""
    if not prompts:
        raise ApiError(400, "prompt must not be empty", param="prompt", code="empty_prompt")
    ids = [await encode(tokenizer, p) if isinstance(p, str) else p for p in prompts]
    if not all(ids):
        raise ApiError(400, "prompt must have at least one token", param="prompt", code="empty_prompt")
    return ids


async def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids of the conversation in the model's own template, up to where the assistant's turn begins."""
    if not tokenizer.has_chat_template:
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
    try:
        text = tokenizer.apply_chat_template([_plain(m) for m in messages])
    except ValueError as e:
        raise ApiError(400, str(e), param="messages", code="chat_template_error") from e
    ids = await encode(tokenizer, text, add_special_tokens=False)
    if not ids:
        raise ApiError(400, "messages make an empty prompt", param="messages", code="empty_prompt")
    return ids


def room(prompt: Sequence[int], max_tokens: int | None, max_model_len: int, field: str, length_field: str) -> int:
    """How many tokens may follow `prompt`: as many as asked for, or what the context holds if nothing was said."""
    free = max_model_len - len(prompt)
    asked = 1 if max_tokens is None else max_tokens
    if asked > free:
        raise ApiError(
            400,
            f"this model's context is {max_model_len} tokens; the request needs {len(prompt) + asked} "
            f"({len(prompt)} in the {field}, {asked} in the completion)",
            param=field if free < 1 else length_field,
            code="context_length_exceeded",
        )
    return free if max_tokens is None else max_tokens


def _plain(message: Message) -> dict[str, str]:
    """A message as templates know it: text content, and "developer" under its older name."""
    role = "system" if message.role == "developer" else message.role
    text = message.content if isinstance(message.content, str) else "\n".join(_text(p) for p in message.content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": text, **named}


def _text(part: TextPart) -> str:
    return part.text
