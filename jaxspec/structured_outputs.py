"""What a structured output must match: vLLM's `structured_outputs`, and OpenAI's `response_format`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec.errors import InvalidRequest

#: Most characters of a schema, regex or grammar, or of all choices.
MAX_CHARACTERS = 100_000
#: The kinds of structure, and the types of their values.
KINDS: Mapping[str, type | tuple[type, ...]] = {
    "json": (Mapping, bool, str), "regex": str, "choice": (list, tuple), "grammar": str, "json_object": bool,
    "structural_tag": Mapping,
}  # fmt: skip


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint on the output. Exactly one of the kinds is set; they are named as in vLLM.

    Raises `InvalidRequest`.
    """

    #: JSON schema, as a mapping or as text.
    json: Mapping[str, Any] | bool | str | None = None
    #: Regular expression for the whole output, in the syntax of Rust's regex crate.
    regex: str | None = None
    #: The output is one of these texts.
    choice: Sequence[str] | None = None
    #: Context-free grammar in llguidance's variant of Lark, or in GBNF.
    grammar: str | None = None
    #: True: any JSON object.
    json_object: bool | None = None
    #: Free text in which tags begin JSON: `{"structures": [{"begin", "schema", "end"}], "triggers": […]}`.
    structural_tag: Mapping[str, Any] | None = None
    #: Request field that the constraint came from, for error messages.
    given_as: str = field(default="structured_outputs", compare=False)

    def __post_init__(self) -> None:
        if len(given := [kind for kind in KINDS if getattr(self, kind) is not None]) != 1:
            found = f"has {' and '.join(given)}" if given else "has none"
            raise InvalidRequest(
                self.given_as, f"{self.given_as} must have exactly one of {', '.join(KINDS)}; this one {found}"
            )
        value = getattr(self, self.kind)
        if not isinstance(value, KINDS[self.kind]):
            raise self.invalid(f"must not be a {type(value).__name__}")
        if self.kind == "choice" and not (value and all(isinstance(c, str) and c for c in value)):
            raise self.invalid("must be a list of non-empty strings")
        if self.kind == "json_object" and not value:
            raise self.invalid("must be true, or left out")
        if len(str(value)) > MAX_CHARACTERS:
            raise self.invalid(f"must have at most {MAX_CHARACTERS} characters")

    @property
    def kind(self) -> str:
        """Name of the constraint field that is set."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def schema(self) -> Mapping[str, Any] | bool:
        """The JSON schema of `json` or `json_object`. Raises `InvalidRequest` if its text is not JSON."""
        if self.json is None:
            return {"type": "object"}
        if not isinstance(self.json, str):
            return self.json
        try:
            found = json.loads(self.json)
        except (ValueError, RecursionError) as error:
            raise self.invalid(f"is not JSON: {error}") from None
        if not isinstance(found, (dict, bool)):
            raise self.invalid("must be a schema, which is an object or a boolean")
        return found

    def invalid(self, rule: str) -> InvalidRequest:
        """The error that says what is wrong with it."""
        name = f"{self.given_as}.{self.kind}" if self.given_as == "structured_outputs" else self.given_as
        return InvalidRequest(self.given_as, f"{name} {rule}")
