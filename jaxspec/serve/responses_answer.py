"""Builds the responses of `/v1/responses`: the object, or the events of a stream."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from jaxspec.chat.pieces import Piece
from jaxspec.outputs import OutputDelta
from jaxspec.serve.answer import Json
from jaxspec.serve.chat_answer import ChatAnswer
from jaxspec.serve.errors import ApiError
from jaxspec.serve.responses_fields import ResponsesRequest

#: What an item's id begins with, and the type of its part; calls have none.
_ITEMS = {
    "reasoning": ("rs", "reasoning_text"), "message": ("msg", "output_text"), "function_call": ("fc", None)
}  # fmt: skip


class ResponsesAnswer(ChatAnswer):
    """Each part of the answer is an output item: reasoning, a message, or a function call."""

    end = b""

    def __init__(self, *head: Any, body: ResponsesRequest, **keywords: Any) -> None:
        super().__init__(*head, **keywords)
        self._body = body
        self._items: list[Json] = []
        self._sequence = 0
        self._open = False  # whether the last item goes on
        self._logprobs_seen: list[Json] = []  # of all tokens so far
        self._attached = 0  # how many of them belong to items

    def gather(self, index: int, delta: OutputDelta) -> None:
        self._advance(delta)

    def whole(self) -> Json:
        return self._response(self._status())

    def chunks(self, index: int, delta: OutputDelta) -> list[Json]:
        """The events of a delta, with OpenAI's names and numbers."""
        out = [*self._created(), *self._advance(delta)]
        if delta.finish_reason is not None:
            status = self._status()
            out.append({"type": f"response.{status}", "response": self._response(status)})
        return self._numbered(out)

    def last_chunks(self) -> list[Json]:
        return []

    def failed(self, error: ApiError) -> list[Json]:
        told = {"code": "server_error", "message": error.body["error"]["message"]}
        failed = {"type": "response.failed", "response": self._response("failed") | {"error": told}}
        return self._numbered([*self._created(), failed])

    def _created(self) -> list[Json]:
        """The events that begin a stream, once."""
        if self.choices[0].opened:
            return []
        self.choices[0].opened = True
        started = self._response("in_progress")
        return [{"type": f"response.{name}", "response": started} for name in ("created", "in_progress")]

    def _numbered(self, events: list[Json]) -> list[Json]:
        out = [{**event, "sequence_number": self._sequence + i} for i, event in enumerate(events)]
        self._sequence += len(events)
        return out

    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    def _advance(self, delta: OutputDelta) -> list[Json]:
        """Add the delta to the items. Returns the events."""
        choice = self.choices[0]
        self._count(choice, delta)
        if delta.logprobs:
            self._logprobs_seen += self._logprobs(choice, delta.logprobs)["content"]
        out: list[Json] = []
        for piece in self._parsed(choice, delta):
            out += self._add(piece)
        if delta.finish_reason is not None:
            if not self._items:
                out += self._begin("message")
            out += self._end_item(self._status())
        return out

    def _new_logprobs(self) -> list[Json]:
        """Log-probabilities of content tokens that no event has carried yet."""
        parser = self._parsers[0]
        start = max(self._attached, parser.reasoning_tokens if parser else 0)
        self._attached = len(self._logprobs_seen)
        return self._logprobs_seen[start:]

    def _add(self, piece: Piece) -> list[Json]:
        match piece.kind:
            case "call":
                self._attached = len(self._logprobs_seen)
                return self._begin("function_call", call_id=self._chat.call_id(), name=piece.text, arguments="")
            case "arguments":
                self._attached = len(self._logprobs_seen)
                item = self._items[-1]
                item["arguments"] += piece.text
                return [self._event("function_call_arguments.delta", item, delta=piece.text)]
            case kind:
                wanted = "message" if kind == "content" else "reasoning"
                begun = [] if self._open and self._items[-1]["type"] == wanted else self._begin(wanted)
                item = self._items[-1]
                part = item["content"][0]
                part["text"] += piece.text
                more = {}
                if kind == "content":
                    more = {"logprobs": self._new_logprobs()}
                    part["logprobs"] = [*part["logprobs"], *more["logprobs"]]
                return [*begun, self._event(f"{part['type']}.delta", item, content_index=0, delta=piece.text, **more)]

    def _begin(self, kind: str, **fields: Any) -> list[Json]:
        """Begin an item, after the end of the last one."""
        out = self._end_item("completed")
        prefix, part_type = _ITEMS[kind]
        item: Json = {"type": kind, "id": f"{prefix}_{uuid4().hex}", "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant"}
        if kind == "reasoning":
            item |= {"summary": []}
        if part_type:
            item |= {"content": []}
        self._items.append(item)
        self._open = True
        out.append(self._added(item))
        if part_type:
            part: Json = {"type": part_type, "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            item["content"].append(part)
            out.append(self._event("content_part.added", item, content_index=0, part=dict(part)))
        return out

    def _end_item(self, status: str) -> list[Json]:
        if not self._open:
            return []
        self._open = False
        item, out = self._items[-1], []
        item["status"] = status
        if item["type"] == "function_call":
            out.append(
                self._event("function_call_arguments.done", item, name=item["name"], arguments=item["arguments"])
            )
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            out.append(self._event(f"{part['type']}.done", item, content_index=0, text=part["text"], **more))
            out.append(self._event("content_part.done", item, content_index=0, part=part))
        at = len(self._items) - 1
        return [*out, {"type": "response.output_item.done", "output_index": at, "item": item}]

    def _added(self, item: Json) -> Json:
        shown = {**item, **({"content": []} if "content" in item else {})}
        return {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": shown}

    def _event(self, name: str, item: Json, /, **fields: Any) -> Json:
        at = len(self._items) - 1
        return {"type": f"response.{name}", "item_id": item["id"], "output_index": at, **fields}

    def _response(self, status: str) -> Json:
        """The response object."""
        body, ended = self._body, status not in ("in_progress", "failed")
        form = body.text.format if body.text is not None else None
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._items) if ended else [],
            "usage": self._usage() if ended else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": body.tool_choice or "auto",
            "tools": [
                {"parameters": None, "strict": None, **t.model_dump(exclude_unset=True)} for t in body.tools or ()
            ],
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "truncation": body.truncation or "disabled",
            "metadata": (body.model_extra or {}).get("metadata") or {},
            "previous_response_id": None,
            "store": False,
            "background": False,
            **(self._metrics() if ended else {}),
        }

    def _usage(self) -> Json:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": usage["total_tokens"],
        }
