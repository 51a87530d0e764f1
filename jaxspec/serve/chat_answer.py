"""Builds the responses of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from jaxspec.chat.parser import ChatParser
from jaxspec.chat.pieces import Piece
from jaxspec.outputs import OutputDelta, TokenLogprob
from jaxspec.serve.answer import MIN_LOGPROB, Answer, Choice, Json


@dataclass(frozen=True)
class ChatForm:
    """What answers are made of. parser: makes the parser of an answer; None: all its text is content.

    named: the client chose the function that is called. id_length: characters of a call's id; None: OpenAI's form.
    show_reasoning: whether the response has it.
    """

    parser: Callable[[], ChatParser] | None = None
    named: bool = False
    id_length: int | None = None
    show_reasoning: bool = True

    def call_id(self) -> str:
        """A new id of a tool call."""
        return uuid4().hex[: self.id_length] if self.id_length else f"call_{uuid4().hex[:24]}"


@dataclass(slots=True)
class AssistantMessage:
    """What a complete answer has so far. calls: id, name and arguments of each."""

    reasoning: str = ""
    content: str = ""
    calls: list[Json] = field(default_factory=list)

    def add(self, piece: Piece, form: ChatForm) -> None:
        match piece.kind:
            case "reasoning":
                self.reasoning += piece.text
            case "content":
                self.content += piece.text
            case "call":
                self.calls.append({"id": form.call_id(), "type": "function", "function": _function(piece.text, "")})
            case "arguments":
                self.calls[piece.index]["function"]["arguments"] += piece.text


class ChatAnswer(Answer):
    """The response of `/v1/chat/completions`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *head: Any, chat: ChatForm | None = None, **keywords: Any) -> None:
        super().__init__(*head, **keywords)
        self._chat = chat = chat or ChatForm()
        self._parsers = [chat.parser() if chat.parser else None for _ in self.choices]
        self._messages = [AssistantMessage() for _ in self.choices]

    def usage(self) -> Json:
        thought = [p.reasoning_tokens for p in self._parsers if p is not None]
        details = {"completion_tokens_details": {"reasoning_tokens": sum(thought)}} if thought else {}
        return super().usage() | details

    def gather(self, index: int, delta: OutputDelta) -> None:
        super().gather(index, delta)
        for piece in self._parsed(self.choices[index], delta):
            self._messages[index].add(piece, self._chat)

    def whole(self) -> Json:
        return super().whole() | self._of_prompt(self.choices[0])

    def _parsed(self, choice: Choice, delta: OutputDelta) -> list[Piece]:
        """The pieces of the answer that the delta completes."""
        if (parser := self._parsers[choice.index]) is None:
            return [Piece("content", delta.text)] if delta.text else []
        pieces = parser.feed(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            pieces += parser.finish()
        return [p for p in pieces if p.kind != "reasoning" or self._chat.show_reasoning]

    def _choice(self, choice: Choice) -> Json:
        content = [entry for part in choice.logprobs for entry in part["content"]]
        message = self._messages[choice.index]
        optional = {"reasoning_content": message.reasoning, "reasoning": message.reasoning} if message.reasoning else {}
        calls = {"tool_calls": message.calls} if message.calls else {}
        text = message.content or (None if calls or optional else "")
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None, **optional, **calls},
            "logprobs": {"content": content, "refusal": None} if choice.logprobs else None,
            "finish_reason": self._reason(choice),
            "stop_reason": choice.stop_reason,
            **self._of_output(choice),
        }

    def _reason(self, choice: Choice) -> str | None:
        """The finish reason in the response."""
        parser = self._parsers[choice.index]
        called = parser is not None and parser.calls and not self._chat.named
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason

    def _opening(self, choice: Choice, first: OutputDelta) -> list[Json]:
        return [self._delta(choice, {"role": "assistant", "content": ""})]

    def _pieces(self, choice: Choice, delta: OutputDelta) -> list[Json]:
        return [self._delta(choice, self._shown(piece)) for piece in self._parsed(choice, delta)]

    def _shown(self, piece: Piece) -> Json:
        """The piece as the `delta` of a chunk."""
        match piece.kind:
            case "reasoning":
                return {"reasoning_content": piece.text, "reasoning": piece.text}
            case "content":
                return {"content": piece.text}
            case "call":
                call = {"id": self._chat.call_id(), "type": "function"}
                return {"tool_calls": [{"index": piece.index, **call, "function": _function(piece.text, "")}]}
            case "arguments":
                return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _piece(self, choice: Choice, text: str, logprobs: Json | None) -> Json:
        return self._delta(choice, {"content": text}, logprobs)

    def _ending(self, choice: Choice) -> Json:
        end = {"finish_reason": self._reason(choice), "stop_reason": choice.stop_reason}
        return self._delta(choice, {}) | end

    def _delta(self, choice: Choice, delta: Json, logprobs: Json | None = None) -> Json:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, choice: Choice, entries: Sequence[TokenLogprob]) -> Json:
        content = [
            self._entry(e.token_id, e.logprob) | {"top_logprobs": [self._entry(id, lp) for id, lp in e.top]}
            for e in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, id: int, logprob: float) -> Json:
        raw = self._tokenizer.token_bytes(id)
        return {"token": self._token(id), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}


def _function(name: str, arguments: str) -> Json:
    return {"name": name, "arguments": arguments}
