"""llguidance grammars of answers with tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.chat.formats import ToolFormat
from jaxspec.chat.tools import Tool, ToolUse
from jaxspec.constraints.lark import HEADER, TEXT, head_rule, json_rule, token_or_text

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer


def tool_grammar(
    use: ToolUse, form: ToolFormat, tokenizer: Tokenizer, content: Mapping[str, Any] | bool | None = None
) -> str:
    """A Lark grammar of answers that call tools in the model's format.

    content: the schema of an answer that calls none; None: it is any text. Such an answer is possible unless a call is
    required. Raises `ValueError` if llguidance would not follow one of the schemas.
    """
    begin, end = token_or_text(form.begin, tokenizer), token_or_text(form.end, tokenizer) if form.end else ""
    rules = [HEADER, *_calls(use.tools, form, tokenizer)]
    more = use.parallel
    if form.bare:
        begun, calls = "one", "one" + ' (WS ";" WS one)*' * more
    elif form.listed:
        begun, calls = f"{begin} rest", "rest"
        rules.append('rest: WS "[" WS one' + ' (WS "," WS one)*' * more + ' WS "]"')
    else:
        begun = f"{begin} WS one WS {end}"
        calls = f"WS one WS {end}" + f" (WS {begun})*" * more
    if form.bare:
        rules.append(f"calls: {calls}")
    else:
        rules.append(f"calls: {begin} {calls}")
    if use.required:
        return "\n".join([*rules, "start: calls"])
    if content is not None:
        return "\n".join([*rules, json_rule("content", content), "start: content | calls WS"])
    if form.bare:
        return "\n".join([*rules, r"TEXT: /\s*[^{\s](.|\n)*/", "start: TEXT | calls WS |"])
    return "\n".join([*rules, TEXT, head_rule("head", form.begin, tokenizer), f"start: TEXT | head {calls} WS"])


def _calls(tools: tuple[Tool, ...], form: ToolFormat, tokenizer: Tokenizer) -> list[str]:
    """Rules of one call of any of the tools: `one`."""
    rules = ["one: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        try:
            rules.append(json_rule(f"arguments_{i}", tool.schema()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the parameters of {tool.name!r} are not possible: {error}") from None
        if form.name_first:
            rules.append(f"call_{i}: {json.dumps(tool.name)} {token_or_text(form.separator, tokenizer)} arguments_{i}")
            continue
        key, name = json.dumps(json.dumps(form.key)), json.dumps(json.dumps(tool.name))
        rules.append(f'call_{i}: "{{" WS "\\"name\\"" WS ":" WS {name} WS "," WS {key} WS ":" WS arguments_{i} WS "}}"')
    return rules
