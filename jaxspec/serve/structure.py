"""Structured output in request bodies, under its names in OpenAI's API, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxspec.errors import InvalidRequest
from jaxspec.serve.fields import ApiModel, StrictModel
from jaxspec.structured_outputs import StructuredOutputs


class OutputStructure(StrictModel):
    """`structured_outputs`: see `StructuredOutputs`."""

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class JsonSchema(StrictModel):
    """`json_schema` of a `response_format`. Every schema is followed strictly."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    #: llama.cpp's place for the schema of a json_object.
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    # Of a structural tag: see `structural_tag_grammar`.
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: Any = None


class StructureFields(ApiModel):
    """What the output must match, by whichever field."""

    response_format: ResponseFormat | None = None
    structured_outputs: OutputStructure | None = None
    # Other names of structured outputs: those of vLLM before 0.12, SGLang and llama.cpp.
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None

    def structure(self) -> StructuredOutputs | None:
        """What the output must match, by whichever field. Raises `InvalidRequest` naming two that are given."""
        found: dict[str, dict[str, Any]] = {}
        if self.structured_outputs is not None:
            found["structured_outputs"] = given = self.structured_outputs.model_dump(by_alias=True)
            if isinstance(tag := given["structural_tag"], str):  # vLLM's clients send it as text
                given["structural_tag"] = _object_in(tag, "structured_outputs")
        for name, kind in _STRUCTURE_NAMES.items():
            if (value := getattr(self, name)) is not None:
                found[name] = {kind: value}
        form = self.response_format
        if form is not None and form.schema_ is not None and form.type != "json_object":
            raise InvalidRequest("response_format", "response_format.schema needs the type json_object")
        if form is not None and form.type != "json_schema" and form.json_schema is not None:
            raise InvalidRequest("response_format", "response_format.json_schema needs the type json_schema")
        if form is not None and form.type != "text":
            found["response_format"] = {"json_object": True} if form.schema_ is None else {"json": form.schema_}
            if form.type == "json_schema":
                schema = form.json_schema.schema_ if form.json_schema else None
                if schema is None:
                    raise InvalidRequest("response_format", "response_format.json_schema.schema is required")
                found["response_format"] = {"json": schema}
            if form.type == "structural_tag":
                names = ("structures", "triggers", "format")
                found["response_format"] = {"structural_tag": form.model_dump(include=set(names), exclude_none=True)}
        if len(found) > 1:
            first, second, *_ = found
            raise InvalidRequest(second, f"{first} and {second} cannot both be given")
        return next((StructuredOutputs(**given, given_as=name) for name, given in found.items()), None)


def _object_in(text: str, field: str) -> dict[str, Any]:
    """The JSON object in the text of a structural tag. Raises `InvalidRequest`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise InvalidRequest(field, f"{field}.structural_tag is not JSON: {e}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(field, f"{field}.structural_tag must be an object")
    return found


#: Other names of the fields of `StructuredOutputs`.
_STRUCTURE_NAMES = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar",
}  # fmt: skip
