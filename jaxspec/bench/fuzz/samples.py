"""Valid bodies of the POST routes, from which mutations start."""

from __future__ import annotations

from random import Random
from typing import Any

_PROMPTS = ("The river bends", "Count: 1, 2, 3,", "Ein Satz mit Umlauten: äöü", "漢字と 🦉", "x")
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object", "properties": {"place": {"type": "string", "maxLength": 20}}, "required": ["place"],
        },
    },
}  # fmt: skip
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def _some(random: Random, fields: dict[str, Any], share: float = 0.25) -> dict[str, Any]:
    """A random part of the fields."""
    return {name: value for name, value in fields.items() if random.random() < share}


def _sampling(random: Random) -> dict[str, Any]:
    optional = {
        "temperature": random.choice((0, 0.7, 1.5)), "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": random.choice((1, 2,
        3)),
        "seed": random.choice((0, 7, 2**40)), "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": ["\n\n",
        "zz"],
        "repetition_penalty": 1.1, "logit_bias": {"5": 10, "7": -100}, "stop_token_ids": [3, 4], "ignore_eos": True,
        "min_tokens": 2, "bad_words": ["foo"], "allowed_token_ids": list(range(100)), "prompt_logprobs": 1,
        "truncate_prompt_tokens": 8, "priority": random.choice((-1, 0, 5)), "return_token_ids": True,
        "slo": {"ttft_ms": 60_000, "tpot_ms": 10_000}, "user": "someone", "return_predicted_tokens": True,
        "skip_special_tokens": False, "include_stop_str_in_output": True, "model": None,
    }  # fmt: skip
    fields = {"max_tokens": random.choice((1, 4, 8)), **_some(random, optional, 0.12)}
    if random.random() < 0.3:
        fields["stream"] = True
        fields |= _some(random, {"stream_options": {"include_usage": True, "continuous_usage_stats": True},
                                 "return_accepted_drafts": True})  # fmt: skip
    return fields


def _structured(random: Random) -> dict[str, Any]:
    if random.random() > 0.08:
        return {}
    return random.choice((
        {"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "[ab]{1,4}"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
        {"structured_outputs": {"choice": ["yes", "no"]}}, {"grammar": 'root ::= "a" | "b"'},
    ))  # fmt: skip


def completion(random: Random) -> dict[str, Any]:
    prompt = random.choice((*_PROMPTS, list(_PROMPTS[:2]), [10, 20, 30], [[1, 2], [3]]))
    more = _some(random, {"echo": True, "logprobs": 2, "best_of": 1, "add_special_tokens": False}, 0.1)
    return {"prompt": prompt, **_sampling(random), **more, **_structured(random)}


def messages(random: Random) -> list[dict[str, Any]]:
    talk: list[dict[str, Any]] = [{"role": "system", "content": "Be short."}] if random.random() < 0.3 else []
    talk.append({"role": "user", "content": random.choice((*_PROMPTS, [{"type": "text", "text": "in parts"}]))})
    if random.random() < 0.3:
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
        talk.append({"role": "assistant", "content": None, "tool_calls": [call]})
        talk.append({"role": "tool", "tool_call_id": "c1", "content": "sunny"})
    return talk


def chat(random: Random) -> dict[str, Any]:
    optional = {
        "logprobs": True, "tools": [_TOOL], "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "documents": [{"title": "a", "text": "b"}], "thinking_token_budget": 3, "parallel_tool_calls": False,
        "add_generation_prompt": True,
    }  # fmt: skip
    more = _some(random, optional, 0.15)
    if "tools" in more:
        named = {"type": "function", "function": {"name": "weather"}}
        more["tool_choice"] = random.choice(("auto", "none", "required", named))
    if "logprobs" in more:
        more["top_logprobs"] = 2
    return {"messages": messages(random), **_sampling(random), **more, **_structured(random)}


def response(random: Random) -> dict[str, Any]:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    optional = {
        "instructions": "Be short.", "temperature": 0.5, "top_p": 0.9, "stream": True, "metadata": {"a": "b"},
        "tools": [{"type": "function", **_TOOL["function"]}], "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low"}, "store": False, "truncation": "disabled", "seed": 3, "stop": ["q"],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    }  # fmt: skip
    return {"input": random.choice(("Hello", items)), "max_output_tokens": 6, **_some(random, optional, 0.15)}


def tokenize(random: Random) -> dict[str, Any]:
    asked = {"messages": messages(random)} if random.random() < 0.4 else {"prompt": random.choice(_PROMPTS)}
    return {**asked, **_some(random, {"add_special_tokens": False, "return_token_strs": True})}


def detokenize(random: Random) -> dict[str, Any]:
    return {"tokens": [random.randrange(250) for _ in range(random.choice((0, 1, 20)))]}


#: Route -> (a valid body, how often it is tried).
ROUTES = {
    "/v1/completions": (completion, 5), "/v1/chat/completions": (chat, 6), "/v1/responses": (response, 3),
    "/tokenize": (tokenize, 2), "/detokenize": (detokenize, 1),
}  # fmt: skip


def sample(random: Random) -> tuple[str, dict[str, Any]]:
    """A route and a valid body for it."""
    route = random.choices(list(ROUTES), [weight for _, weight in ROUTES.values()])[0]
    return route, ROUTES[route][0](random)
