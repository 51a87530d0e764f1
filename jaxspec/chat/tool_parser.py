"""Splits an answer's text into content and tool calls."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from jaxspec.chat.call_scanner import CallScanner
from jaxspec.chat.formats import ToolFormat
from jaxspec.chat.pieces import Piece, held_back

#: Characters between calls. An opening bracket may also begin a tag.
_BETWEEN = " \n\t\r,;]"
#: A function's name before its arguments, with a call id and the separator.
_NAME = re.compile(r"[\w.-]{1,64}(\[[A-Z_]*\]?\w*)*\Z")


class ToolParser:
    """Text that is not a call in the model's format is content. Whitespace between content and calls is dropped.

    A call without a begin tag (`ToolFormat.bare`) counts only if the function is one of `names`.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]):
        self._form, self._names = form, frozenset(names)
        #: content: outside of calls. calls: before a call or between two. call: within one.
        self._phase: Literal["content", "calls", "call"] = "content"
        self._held = ""
        self._blank = ""  # whitespace at the begin of content, dropped if a call follows
        self._raw = ""  # text since the begin of the calls, for when they turn out to be content
        self._scanner = CallScanner()
        self._announced = self._bare = self._began = False
        self._named = False  # whether the begin tag was last, so that a name may follow
        self._sent = 0  # characters of the current call's arguments
        #: Calls so far.
        self.calls = 0

    def feed(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._held += text
        out: list[Piece] = []
        while self._advance(out):
            pass
        return out

    def finish(self) -> list[Piece]:
        """The pieces of what was held back, when no text follows."""
        out: list[Piece] = []
        if self._phase == "call" and not self._announced:
            self._raw += self._scanner.raw
            self._not_a_call(out)
        elif self._phase == "calls" and (self._held.strip() or not self.calls):
            self._not_a_call(out)
        if self._phase == "content":
            out += self._content(self._held)
            if self._blank and not self.calls:
                out.append(Piece("content", self._blank))
        self._held = ""
        return out

    def _advance(self, out: list[Piece]) -> bool:
        """Take the next part of the held text. False if more text is needed."""
        match self._phase:
            case "content":
                return self._in_content(out)
            case "calls":
                return self._before_call(out)
            case "call":
                return self._in_call(out)

    def _in_content(self, out: list[Piece]) -> bool:
        begin = self._form.begin
        if self._form.bare and not self._began and (shown := (self._blank + self._held).lstrip()):
            self._began = True
            if shown.startswith("{"):
                self._phase, self._bare, self._raw = "calls", True, ""
                return True
        before, found, after = self._held.partition(begin)
        safe = before if found else before[: len(before) - held_back(before, begin)]
        out += self._content(safe)
        self._held = after if found else before[len(safe) :]
        if found:
            self._phase, self._bare, self._named, self._raw = "calls", False, True, begin
        return bool(found)

    def _content(self, text: str) -> list[Piece]:
        text, self._blank = self._blank + text, ""
        if not text.strip():
            self._blank = text
            return []
        shown = text.rstrip()
        self._blank, self._began = text[len(shown) :], True
        return [Piece("content", shown)]

    def _before_call(self, out: list[Piece]) -> bool:
        rest = self._held.lstrip(_BETWEEN)
        self._raw += self._held[: len(self._held) - len(rest)]
        self._held = rest
        for mark in (self._form.end, self._form.begin):
            if not mark:
                continue
            if rest.startswith(mark):
                self._held = rest.removeprefix(mark)
                self._raw += mark
                self._named = mark == self._form.begin
                self._phase = "content" if mark == self._form.end else "calls"
                return True
            if mark.startswith(rest):
                return False
        if rest.startswith("{"):
            self._begin(CallScanner())
            return True
        if rest.startswith("["):
            self._raw, self._held = self._raw + "[", rest[1:]
            return True
        head, found, _ = rest.partition("{")
        if self._form.names_before and self._named and _NAME.match(head):
            if not found:
                return False
            self._begin(CallScanner(head.split("[")[0].strip()))
            self._raw, self._held = self._raw + head, rest.removeprefix(head)
            return True
        self._not_a_call(out)
        return True

    def _begin(self, scanner: CallScanner) -> None:
        self._scanner, self._phase, self._announced, self._sent = scanner, "call", False, 0
        self._named = False

    def _in_call(self, out: list[Piece]) -> bool:
        scanner = self._scanner
        read = scanner.feed(self._held)
        self._held = self._held[read:]
        unknown = self._bare and scanner.name is not None and scanner.name not in self._names
        if not self._announced and (scanner.failed or unknown or (scanner.done and not scanner.name)):
            self._raw += scanner.raw
            self._not_a_call(out)
            return True
        if scanner.name and not self._announced:
            self._announced, self._blank = True, ""
            self.calls += 1
            out.append(Piece("call", scanner.name, self.calls - 1))
        if self._announced and len(new := scanner.arguments) > self._sent:
            out.append(Piece("arguments", new[self._sent :], self.calls - 1))
            self._sent = len(new)
        if not scanner.done:
            return False
        self._phase, self._raw = "calls", ""
        return True

    def _not_a_call(self, out: list[Piece]) -> None:
        """The text since the begin of the calls, or after the last one, is content."""
        raw, self._raw, self._phase, self._began = self._raw, "", "content", True
        if raw.strip(_BETWEEN + "["):  # not only what separates calls
            out += self._content(raw)
