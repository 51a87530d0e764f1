"""What a chat request means: its prompt, its sampling parameters, and how its answers are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxspec.chat.formats import ToolFormat
from jaxspec.chat.grammar import tool_grammar
from jaxspec.chat.parser import ChatParser
from jaxspec.chat.prompt import special, tool_format
from jaxspec.chat.reasoning import reasoning_of, tags_of
from jaxspec.chat.tool_parser import ToolParser
from jaxspec.chat.tools import ToolUse
from jaxspec.constraints.json_schema import check_schema
from jaxspec.errors import InvalidRequest
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.chat_answer import ChatForm
from jaxspec.serve.errors import ApiError, bad_request
from jaxspec.serve.prompts import encode_chat, most_tokens
from jaxspec.serve.protocol import ChatRequest
from jaxspec.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine
    from jaxspec.models.load.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatPlan:
    """prompt: token ids. params: `max_tokens` is None if the request has no limit."""

    prompt: list[int]
    params: SamplingParams
    form: ChatForm


async def plan_chat(body: ChatRequest, engine: Engine) -> ChatPlan:
    """Render the prompt of the model's template, and choose the parsers of its answers.

    Raises `ApiError` (400) naming the field that is wrong.
    """
    tokenizer, template = engine.tokenizer, engine.tokenizer.chat_template
    params, use = body.sampling(engine.default_sampling), body.tool_use()
    add_special = bool(body.add_special_tokens)
    most = most_tokens(body, engine.max_model_len)
    text, ids = await encode_chat(tokenizer, body.messages, body, body.template_tools(), add_special, most)
    splits = engine.config.reasoning_parser != "none"
    reasoning = reasoning_of(template, text, bool(body.continue_final_message)) if splits else None
    if body.thinking_token_budget is not None and (tags_of(template) is None or not splits):
        why = "the model's chat template has no reasoning" if splits else "the server's reasoning_parser is none"
        message = f"thinking_token_budget is not supported: {why}"
        raise ApiError(400, message, param="thinking_token_budget", code="unsupported_parameter")
    calls = tool_format(tokenizer, engine.config.tool_call_parser)
    tags = (calls.tags if use else []) + ([reasoning.begin, reasoning.end] if reasoning else [])
    params = replace(
        params, reasoning=reasoning, structured_outputs=_outputs(params, use, calls, tokenizer),
        # The parser reads tags as text.
        skip_special_tokens=params.skip_special_tokens and not special(tags, tokenizer),
    )  # fmt: skip
    shown = reasoning if body.separate_reasoning is not False else None
    names = [tool.name for tool in use.tools] if use else []

    def parser() -> ChatParser:
        tools = ToolParser(calls, names) if use else None
        return ChatParser(shown, tools, tokenizer.token_bytes)

    form = ChatForm(
        parser if use or shown else None, use is not None and use.named, calls.id_length,
        body.include_reasoning is not False,
    )  # fmt: skip
    return ChatPlan(ids, params, form)


def _outputs(
    params: SamplingParams, use: ToolUse | None, form: ToolFormat, tokenizer: Tokenizer
) -> StructuredOutputs | None:
    """What the answer must match, tool calls included. Raises `ApiError`."""
    outputs = params.structured_outputs
    if use is None or not (use.constrained or outputs):
        return outputs
    with bad_request():
        content = None
        if outputs is not None:
            if outputs.kind not in ("json", "json_object"):
                raise InvalidRequest(outputs.given_as, f"{outputs.given_as}: with tools, only JSON is supported")
            check_schema(outputs)
            content = outputs.schema()
        try:
            grammar = tool_grammar(use, form, tokenizer, content)
        except (ValueError, RecursionError) as e:
            raise InvalidRequest("tools", f"tools: {e}") from None
        return StructuredOutputs(grammar=grammar, given_as="tools")
