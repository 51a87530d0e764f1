"""Conversations with tools as prompts, also for models whose chat template does not know tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.chat.formats import FORMATS, HERMES, ToolFormat, format_of

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer

Message = Mapping[str, Any]


def render(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The prompt of a conversation, in the model's chat template.

    messages: as in OpenAI's API, content as text. tools: functions in OpenAI's form. variables: keyword arguments of
    `Tokenizer.apply_chat_template`. A template without tools gets them in the system message, in the Hermes format.
    Raises `ValueError` naming the arguments of a call that are not a JSON object, or if the template refuses the
    messages.
    """
    try:
        if knows_tools(tokenizer):
            shown = [_with_objects(message, i) for i, message in enumerate(messages)]
            return tokenizer.apply_chat_template(shown, tools=list(tools) or None, **variables)
        return tokenizer.apply_chat_template(_as_plain(messages, tools), **variables)
    except RecursionError:
        raise ValueError("the messages, tools or template variables are nested too deeply") from None


def knows_tools(tokenizer: Tokenizer) -> bool:
    """Whether the model's chat template shows tools and calls."""
    return tokenizer.tool_template is not None or "tools" in (tokenizer.chat_template or "")


def tool_format(tokenizer: Tokenizer, parser: str) -> ToolFormat:
    """How the model writes calls. parser: a name in `FORMATS`, or "auto".

    Without tools in the template, the prompt describes the format that `format_of` gives then.
    """
    if parser == "auto" or not knows_tools(tokenizer):
        return format_of(tokenizer.tool_template or tokenizer.chat_template)
    return FORMATS[parser]


def special(tags: Iterable[str], tokenizer: Tokenizer) -> bool:
    """Whether a tag is a special token, so that a parser of the text needs special tokens in it."""
    return any(tokenizer.special_id(tag) is not None for tag in tags)


def _with_objects(message: Message, at: int) -> Message:
    """The message with the arguments of its calls as objects, which templates expect."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for k, call in enumerate(message["tool_calls"]):
        function = call["function"]
        arguments = _object(function.get("arguments"), f"messages[{at}].tool_calls[{k}].function.arguments")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _object(arguments: Any, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ValueError(f"{where} is not valid JSON") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{where} must be a JSON object")
    return arguments


def _as_plain(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
    """Tools, calls and their results as text of system, assistant and user messages."""
    out: list[dict[str, Any]] = []
    if tools and not (messages and messages[0]["role"] == "system"):
        out.append({"role": "system", "content": _description(tools)})
    for at, original in enumerate(messages):
        message = dict(original)
        content = message.get("content") or ""
        if message["role"] == "tool":
            shown = f"<tool_response>\n{content}\n</tool_response>"
            if out and at and messages[at - 1]["role"] == "tool":
                out[-1]["content"] += f"\n{shown}"
                continue
            message = {"role": "user", "content": shown}
        elif calls := _with_objects(message, at).get("tool_calls"):
            texts = [_call(c["function"]) for c in calls]
            message = {"role": message["role"], "content": "\n".join([*([content] if content else []), *texts])}
        elif tools and at == 0 and message["role"] == "system":
            message["content"] = "\n\n".join(filter(None, [content, _description(tools)]))
        out.append(message)
    return out


def _call(function: Mapping[str, Any]) -> str:
    named = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"{HERMES.begin}\n{named}\n{HERMES.end}"


def _description(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, one per line as JSON:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, answer with its name and arguments as JSON between tags:\n"
        f'{HERMES.begin}\n{{"name": "<name>", "arguments": {{<arguments>}}}}\n{HERMES.end}'
    )
