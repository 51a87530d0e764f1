"""The functions that an answer may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Of a function that is declared without parameters.
_NONE = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function. parameters: JSON schema of its arguments. strict: calls always follow it."""

    name: str
    parameters: Mapping[str, Any] | bool = field(default_factory=lambda: _NONE)
    strict: bool = False

    def schema(self) -> Mapping[str, Any] | bool:
        """The schema of the arguments, which are an object. Raises `ValueError` if they cannot be one."""
        if self.parameters is True:
            return {"type": "object"}
        if isinstance(self.parameters, Mapping) and self.parameters.get("type", "object") != "object":
            raise ValueError("their type must be object")
        return {"type": "object", **self.parameters} if isinstance(self.parameters, Mapping) else False


@dataclass(frozen=True)
class ToolUse:
    """The functions that an answer may call. required: it calls at least one. parallel: it may call several.

    named: the client chose the function, so that OpenAI's `finish_reason` stays "stop".
    """

    tools: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True
    named: bool = False

    @property
    def constrained(self) -> bool:
        """Whether a grammar is needed: for calls that must occur, or must match their schemas."""
        return self.required or any(tool.strict for tool in self.tools)
