"""llguidance's grammar of a JSON schema. What it would get wrong is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxspec.errors import InvalidRequest
from jaxspec.structured_outputs import StructuredOutputs

#: Most whitespace in a row. Without a bound, small models write nothing else until they are cut.
WHITESPACE = r"[ \n\t\r]{0,32}"
#: Not \u, so that a key has one form: keys of `additionalProperties` and `patternProperties` are compared as written,
#: and "\u0061" would pass for another key than "a".
_ESCAPES = 'nrbtf\\"'
#: Characters that JSON strings have only as \u.
_ONLY_ESCAPED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def grammar_of(outputs: StructuredOutputs) -> str:
    """The grammar of `json` or `json_object`. Raises `InvalidRequest`."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(check_schema(outputs))


def check_schema(outputs: StructuredOutputs) -> str:
    """The schema of `json` or `json_object`, with options. Raises `InvalidRequest` if its grammar would be wrong."""
    try:
        return with_options(outputs.schema())
    except InvalidRequest:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise outputs.invalid(f"is not possible: {error}") from None


def with_options(schema: Mapping[str, Any] | bool) -> str:
    """The schema as text with the options that llguidance needs. Raises `ValueError` if its grammar would be wrong."""
    if not isinstance(schema, bool) and "x-guidance" in schema:
        raise ValueError("x-guidance changes what a schema means")
    if flaw := next(_flaws(schema), None):
        raise ValueError(flaw)
    options = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": _ESCAPES}
    return json.dumps(({} if isinstance(schema, bool) else dict(schema)) | {"x-guidance": options})


def _flaws(schema: Any) -> Iterator[str]:
    """Why no answer, or not every answer, of llguidance's grammar would match the schema."""
    if schema is False:
        yield "false allows nothing"
    for value in _values(schema):
        # llguidance computes in float64.
        if isinstance(value, int) and abs(value) > 2**53:
            yield "it has an integer beyond 2^53, which would be rounded"
        if isinstance(value, str) and (found := _ONLY_ESCAPED.search(value)):
            yield f"it has the control character {found[0]!r}"
        if isinstance(value, dict):
            least, required = value.get("minProperties"), value.get("required")
            # Keys that no `properties` names may repeat, and then count as one.
            certain = 1 + len(set(map(str, required)) if isinstance(required, list) else ())
            if isinstance(least, int) and least > certain:
                yield f"minProperties is {least}, and at most {certain} (1 + required) keys are certain to differ"


def _values(value: Any) -> Iterator[Any]:
    """The JSON value and all values and names in it."""
    waiting = [value]
    while waiting:
        yield (found := waiting.pop())
        if isinstance(found, dict):
            waiting += [*found, *found.values()]
        elif isinstance(found, list):
            waiting += found
