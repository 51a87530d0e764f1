"""What must hold of every answer, and of the engine after every few."""

from __future__ import annotations

import json
from typing import Any

from jaxspec.bench.fuzz.bodies import Body
from jaxspec.bench.fuzz.server import Answer

_ERROR = {"message", "type", "param", "code"}
#: Codes of answers that tell a client of load, not of its request.
_LOAD = {"queue_full", "slo_unattainable"}
#: Codes of a client's mistakes that are not in a field.
_NO_FIELD = {
    "invalid_json", "invalid_body", "request_too_large", "unknown_url", "method_not_allowed", "request_timeout",
    "invalid_header", "context_length_exceeded",
}  # fmt: skip
#: Most characters of an error's message: a server must not send a body back.
_LONGEST = 4000


def flaw(body: Body, answer: Answer) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if not answer.status:
        return None if answer.cut else "no answer"
    if answer.status < 400:
        return _of_success(answer)
    try:
        found = json.loads(answer.body)
    except ValueError:
        # A request line or header that is no HTTP never reaches the application.
        own = answer.headers.get("content-type", "").startswith("text/plain") and answer.status == 400
        return None if own and b"Invalid HTTP request" in answer.body else f"{answer.status} whose body is not JSON"
    # Of a body that ended too early nothing can be said but that.
    return None if answer.cut and answer.status == 400 else _of_error(answer.status, found)


def _of_error(status: int, found: Any) -> str | None:
    if not isinstance(found, dict) or found.keys() != {"error"} or found["error"].keys() != _ERROR:
        return f"{status} without OpenAI's error object"
    error = found["error"]
    if not isinstance(error["message"], str) or not error["message"]:
        return f"{status} without a message"
    if status >= 500 or (status == 429 and error["code"] not in _LOAD):
        return f"{status}: {error['message'][:300]}"
    if status not in (400, 404, 408, 413, 429):
        return f"unexpected status {status}"
    if len(error["message"]) > _LONGEST:
        return f"a message of {len(error['message'])} characters"
    if status == 400 and error["param"] is None and error["code"] not in _NO_FIELD:
        return f"400 that names no field: {error['message'][:300]}"
    return None


def _of_success(answer: Answer) -> str | None:
    if answer.status != 200:
        return f"unexpected status {answer.status}"
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return _json_flaw(answer)
    events = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
    if not events and not answer.cut:
        return "a stream without events"
    for event in events:
        if event == b"[DONE]":
            continue
        try:
            found = json.loads(event)
        except ValueError:
            return "an event that is not JSON"
        if isinstance(found, dict) and found.get("error") and "choices" not in found:
            return f"a stream that failed: {str(found['error'])[:300]}"
    return None


def _json_flaw(answer: Answer) -> str | None:
    if answer.cut and not answer.body:
        return None
    try:
        found = json.loads(answer.body)
    except ValueError:
        return "200 whose body is not JSON"
    return (
        None if isinstance(found, dict) and "error" not in {k for k, v in found.items() if v} else "200 with an error"
    )
