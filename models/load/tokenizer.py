"""Tokenizers with their chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tokenizers

from jaxspec.models.load.chat_template import ChatTemplate

#: Well-known end tokens of the supported models, in case a checkpoint's metadata omits them.
END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each of the 256 bytes: printable Latin-1 as is, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers.Tokenizer` with end tokens and chat template.

    `template_tokens`: special tokens as text, by the names that templates use: `bos_token`, `eos_token`, ….
    `tool_template`: the chat template for requests with tools, if the model has one of its own for them.
    """

    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    chat_template: str | None = None
    template_tokens: Mapping[str, str] = field(default_factory=dict)
    tool_template: str | None = None

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text has at least one token for each group of this many."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens."""
        return frozenset(i for i, t in self.backend.get_added_tokens_decoder().items() if t.special)

    def special_id(self, text: str) -> int | None:
        """The id of the control token with this text; None if it is not one."""
        ids = self.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and ids[0] in self.special_ids else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens in `text` are recognised. Lone surrogates become U+FFFD."""
        text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Invalid UTF-8 becomes U+FFFD, ids outside the vocabulary are skipped."""
        shown = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        if self._byte_level:
            return b"".join(self.token_bytes(i) for i in shown).decode("utf-8", "replace")
        return self.backend.decode([i for i in shown if self._token(i) is not None], skip_special_tokens=False)

    def token_bytes(self, id: int) -> bytes:
        """The token's bytes, which may be parts of characters; empty for an id outside the vocabulary."""
        known = self._known_bytes.get(id)
        if known is None:
            if (text := self._token(id)) is None:
                return b""
            to_bytes = _byte_level_bytes if self._byte_level else _metaspace_bytes
            self._known_bytes[id] = known = text.encode() if id in self._added else to_bytes(text)
        return known

    def _token(self, id: int) -> str | None:
        """The token as the vocabulary has it; None for an id outside it."""
        return self.backend.id_to_token(id) if 0 <= id < 2**32 else None

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kw: Any,
    ) -> str:
        """Render a conversation to a prompt that contains the start token: encode it without special tokens.

        `continue_final_message`: end it after the content of the last message, which the output then continues. `kw`:
        variables of the template; with `tools`, it is `tool_template` if there is one. Raises `ValueError` if the model
        has no template, the template refuses the messages, or it does not show the last one.
        """
        template = self._tool_template if kw.get("tools") else self._template
        if template is None:
            raise ValueError("this model has no chat template; use plain completions")
        variables = {**self.template_tokens, "tools": None, "documents": None, **kw}
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        prompt = template.render(messages, **variables)
        return _up_to_content(prompt, messages[-1]) if continue_final_message else prompt

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return None if self.chat_template is None else ChatTemplate(self.chat_template)

    @cached_property
    def _tool_template(self) -> ChatTemplate | None:
        return self._template if self.tool_template is None else ChatTemplate(self.tool_template)

    @cached_property
    def _byte_level(self) -> bool:
        parts = self.backend.decoder, self.backend.pre_tokenizer
        return any(b'"ByteLevel"' in part.__getstate__() for part in parts if part is not None)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _known_bytes(self) -> dict[int, bytes]:
        """Bytes by token id, of the tokens seen so far: those of a whole vocabulary take 0.2 s."""
        return {}

    def to_json(self) -> str:
        """Serialise; `from_json` is the inverse."""
        return json.dumps(
            {
                "backend": self.backend.to_str(),
                "eos_token_ids": self.eos_token_ids,
                "bos_token_id": self.bos_token_id,
                "chat_template": self.chat_template,
                "template_tokens": dict(self.template_tokens),
                "tool_template": self.tool_template,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        spec = json.loads(text)
        backend = tokenizers.Tokenizer.from_str(spec.pop("backend"))
        return cls(backend=backend, eos_token_ids=tuple(spec.pop("eos_token_ids")), **spec)


def _up_to_content(prompt: str, last: Mapping[str, Any]) -> str:
    """The prompt up to the end of the last message's content. Templates may strip the content."""
    content = last.get("content") or ""
    for shown in (content, content.strip()):
        if shown and (begin := prompt.rfind(shown)) >= 0:
            return prompt[: begin + len(shown)]
    raise ValueError("continue_final_message: the last message has no content that the chat template shows")


def end_token_ids(backend: tokenizers.Tokenizer, declared: Iterable[int | None]) -> tuple[int, ...]:
    """The declared end tokens, then the special tokens in `END_TEXTS`, without duplicates."""
    special = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    ids = [i for i in declared if i is not None] + [special[t] for t in END_TEXTS if t in special]
    return tuple(dict.fromkeys(ids))


def _byte_level_bytes(text: str) -> bytes:
    if all(c in _BYTE_OF for c in text):
        return bytes(_BYTE_OF[c] for c in text)
    return text.encode()


def _metaspace_bytes(text: str) -> bytes:
    if byte := _BYTE_TOKEN.match(text):
        return bytes([int(byte[1], 16)])
    return text.replace("▁", " ").encode()


def chat_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text`: as a user message if the model has a chat template, else as is."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    return tokenizer.encode(
        tokenizer.apply_chat_template([{"role": "user", "content": text}]), add_special_tokens=False
    )
