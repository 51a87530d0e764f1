"""Reads a tool call, which is a JSON object, from text that arrives in parts."""

from __future__ import annotations

import json

#: Names of the key whose value has the arguments.
_ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """Follows one JSON object `{"name": …, "arguments": {…}}` character by character.

    `name` is None until it is known; `arguments` is the text of the arguments so far. If `name` is given, the object is
    the arguments themselves.
    """

    def __init__(self, name: str | None = None):
        self.name = name
        self.done = self.failed = False
        self._whole = name is not None
        self._raw = ""
        self._depth = 0
        self._in_string = self._escaped = self._after_colon = False
        self._string_start = 0
        self._key: str | None = None
        self._value_start: int | None = None
        #: Begin and end of the arguments in `_raw`; the end is None until they have ended.
        self._span: tuple[int, int | None] | None = None

    def feed(self, text: str) -> int:
        """Read `text` up to the end of the object. Returns the number of characters read."""
        for i, char in enumerate(text):
            if self.done or self.failed:
                return i
            self._raw += char
            self._step(char, len(self._raw) - 1)
        return len(text)

    @property
    def raw(self) -> str:
        """All text read so far."""
        return self._raw

    @property
    def arguments(self) -> str:
        """The text of the arguments so far, which only grows. Arguments that are a JSON text in a string come at once,
        when they have ended; absent ones are `{}`."""
        if self._whole:
            return self._raw
        if self._span is None:
            return "{}" if self.done else ""
        start, end = self._span
        if self._raw[start] != '"':
            return self._raw[start:end]
        return "" if end is None else self._loads(self._raw[start:end]) or "{}"

    def _step(self, char: str, at: int) -> None:
        if self._in_string:
            self._step_in_string(char, at)
        elif self._depth == 0:
            self._depth, self.failed = 1, char != "{"
        elif char == '"':
            self._in_string, self._string_start = True, at
            self._begin_value(at)
        elif char in "{[":
            self._begin_value(at)
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value(at)
                self.done = True
            elif self._depth == 1:
                self._end_value(at + 1)
        elif self._depth == 1 and char == ",":
            self._end_value(at)
            self._key, self._after_colon = None, False
        elif self._depth == 1 and char == ":":
            self._after_colon = True
        elif not char.isspace():
            self._begin_value(at)

    def _step_in_string(self, char: str, at: int) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1 and self._after_colon:
                self._end_value(at + 1)
            elif self._depth == 1:
                self._key = self._loads(self._raw[self._string_start : at + 1])

    def _begin_value(self, at: int) -> None:
        if self._depth == 1 and self._after_colon and self._value_start is None:
            self._value_start = at
            if self._key in _ARGUMENTS and self._span is None:
                self._span = (at, None)

    def _end_value(self, end: int) -> None:
        if self._value_start is None:
            return
        if self._key == "name" and self.name is None:
            self.name = self._loads(self._raw[self._value_start : end])
            self.failed = self.failed or self.name is None
        elif self._span is not None and self._span[0] == self._value_start:
            self._span = (self._value_start, end)
        self._value_start = None

    def _loads(self, text: str) -> str | None:
        """A JSON string's value; None if it is not one."""
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            return None
        return value if isinstance(value, str) else None
