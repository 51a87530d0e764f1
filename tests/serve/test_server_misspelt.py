"""Constraints under other servers' names, or misspelt: refused by name, or honoured."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from helpers.fakes import FakeEngine
from helpers.serving import error_of

CHAT: Any = {"messages": [{"role": "user", "content": "x"}]}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"best_of": 2}, "best_of"),
        ("chat/completions", {"suffix": "x"}, "suffix"),
        ("chat/completions", {"echo": True}, "echo"),
        ("chat/completions", {"n_predict": 5}, "n_predict"),
        ("chat/completions", {"max_new_tokens": 5}, "max_new_tokens"),
        ("chat/completions", {"repeat_penalty": 1.3}, "repeat_penalty"),
        ("chat/completions", {"guided_regx": "a"}, "guided_regx"),
        ("chat/completions", {"format": "json"}, "format"),
        ("chat/completions", {"response_format": {"type": "json_object", "shema": {}}}, "response_format.shema"),
        (
            "chat/completions",
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}},
            "response_format.json_schema.shema",
        ),
        ("chat/completions", {"tools": [{**TOOL, "strict": True}]}, "tools[0].strict"),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]},
            "tools[0].function.parameter",
        ),
        ("responses", {"text": {"formt": {"type": "json_object"}}}, "text.formt"),
        ("responses", {"format": {"type": "json_object"}}, "format"),
        ("responses", {"max_tokens": 5, "max_output_tokens": 16}, "max_tokens"),
    ],
)
def test_they_are_refused(http: httpx.Client, path: str, body: Any, param: str) -> None:
    response = http.post(f"/v1/{path}", json=({"input": "x"} if path == "responses" else CHAT) | body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_a_schema_in_llama_cpps_place(http: httpx.Client, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    body = CHAT | {"response_format": {"type": "json_object", "schema": schema}, "max_tokens": 5}
    http.post("/v1/chat/completions", json=body).raise_for_status()
    outputs = engine.submitted[-1].structured_outputs
    assert outputs is not None
    assert outputs.json == schema
