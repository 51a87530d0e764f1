"""What users wrote of a prompt: its text without the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from jaxspec.models.load import Tokenizer

_MARKS = {"system": "Qsystem0Q", "user": "Quser1Q", "assistant": "Qassistant2Q"}


def user_text(tokenizer: Tokenizer) -> Callable[[str], str]:
    """A function from a decoded prompt, without special tokens, to its messages: no template, no system prompt.

    The template's parts are found by rendering conversations of known messages. Text that does not look like a rendered
    conversation stays as it is.
    """
    if not tokenizer.has_chat_template:
        return lambda text: text
    plain = _parts(tokenizer, ["user"])
    turns = _parts(tokenizer, ["user", "assistant", "user"])
    system = _parts(tokenizer, ["system", "user"])
    head, tail = (plain[0], plain[-1]) if plain else ("", "")
    between = sorted({part for part in turns[1:-1] if part.strip()}, key=len, reverse=True)
    # Where the template puts the system prompt into the user's message, nothing tells where it ends.
    own_head, own_end = (system[0], system[1]) if system and system[0] != head and system[1].strip() else ("", "")

    def strip(text: str) -> str:
        messages = text.removesuffix(tail)
        if head and messages.startswith(head):
            messages = messages.removeprefix(head)
        elif own_head and messages.startswith(own_head) and own_end in messages:
            messages = messages.partition(own_end)[2]
        for part in between:
            messages = messages.replace(part, "\n")
        return messages.strip() or text

    return strip


def _parts(tokenizer: Tokenizer, roles: Sequence[str]) -> list[str]:
    """What the template writes before, between and after messages of these roles; empty if it refuses them."""
    messages: list[Mapping[str, str]] = [{"role": role, "content": _MARKS[role]} for role in roles]
    try:
        rendered = tokenizer.apply_chat_template(messages)
    except ValueError:
        return []
    text = tokenizer.decode(tokenizer.encode(rendered, add_special_tokens=False))
    parts = re.split("|".join(_MARKS.values()), text)
    return parts if len(parts) == len(roles) + 1 else []
