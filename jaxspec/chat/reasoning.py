"""The reasoning part of an answer: `<think>…</think>` before the content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxspec.chat.pieces import Piece, held_back

#: Tags that begin and end the reasoning, as chat templates have them.
_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class Reasoning:
    """How an answer begins. begin, end: the tags around its reasoning.

    opened: the prompt ends with the begin tag, so that the output is reasoning up to `end`. Otherwise it is if it
    begins with `begin`.
    """

    begin: str
    end: str
    opened: bool = False


def tags_of(template: str | None) -> tuple[str, str] | None:
    """The tags in a model's chat template; None if it has none."""
    return next((tags for tags in _TAGS if tags[1] in (template or "")), None)


def reasoning_of(template: str | None, prompt: str, continued: bool = False) -> Reasoning | None:
    """How the answer to `prompt` begins; None if it has no reasoning part.

    continued: the prompt ends within a message of the assistant.
    """
    if (tags := tags_of(template)) is None:
        return None
    begin, end = tags
    if continued:
        opened = prompt.rfind(begin) > prompt.rfind(end)
        return Reasoning(begin, end, True) if opened else None
    shown = prompt.rstrip()
    # A template ends with both tags to turn reasoning off.
    return None if shown.endswith(end) else Reasoning(begin, end, shown.endswith(begin))


class ReasoningSplitter:
    """Splits an answer's text, which arrives in parts, into reasoning and content. Whitespace around both is dropped
    where the answer has a reasoning part."""

    def __init__(self, form: Reasoning):
        self._form = form
        self._held = ""
        #: maybe: the text so far may become the begin tag.
        self.phase: Literal["maybe", "reasoning", "content"] = "reasoning" if form.opened else "maybe"
        #: Whether the answer has a reasoning part.
        self.found = form.opened
        self._between = ""  # whitespace that belongs to the reasoning if more of it follows
        self._begun = not form.opened  # whether the current part has text

    def feed(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._held += text
        out: list[Piece] = []
        if self.phase == "maybe":
            shown = self._held.lstrip()
            if shown.startswith(self._form.begin):
                self.phase, self._begun, self.found = "reasoning", False, True
                self._held = shown.removeprefix(self._form.begin)
            elif not self._form.begin.startswith(shown):
                self.phase = "content"
        if self.phase == "reasoning":
            before, ended, after = self._held.partition(self._form.end)
            safe = before if ended else before[: len(before) - held_back(before, self._form.end)]
            out += self._reasoning(safe)
            self._held = after if ended else before[len(safe) :]
            if ended:
                self.phase, self._begun = "content", False
        if self.phase == "content":
            shown = self._held if self._begun else self._held.lstrip()
            self._begun = self._begun or bool(shown)
            self._held = ""
            out += [Piece("content", shown)] if shown else []
        return out

    def finish(self) -> list[Piece]:
        """The pieces of what was held back, when no text follows."""
        held, self._held = self._held, ""
        if self.phase == "reasoning":
            return self._reasoning(held)
        return [Piece("content", held)] if held else []

    def _reasoning(self, text: str) -> list[Piece]:
        text = self._between + text
        text = text if self._begun else text.lstrip()
        shown = text.rstrip()
        self._between = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return [Piece("reasoning", shown)] if shown else []
