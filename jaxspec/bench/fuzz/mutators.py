"""Mutations of JSON values, and of the bytes that carry them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from jaxspec.bench.fuzz import hostile
from jaxspec.bench.fuzz.hostile import Raw

Path = tuple[Any, ...]


class Pairs(list[tuple[str, Any]]):
    """An object whose keys may repeat."""


def dump(value: Any) -> str:
    """The value as JSON, `Raw` and `Pairs` as they stand for."""
    match value:
        case Raw():
            return str(value)
        case Pairs():
            return "{" + ",".join(f"{json.dumps(key)}:{dump(item)}" for key, item in value) + "}"
        case dict():
            return "{" + ",".join(f"{json.dumps(str(key))}:{dump(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(dump, value)) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """The places of all values inside, the whole one first."""
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*at, key))
    elif isinstance(value, list) and not isinstance(value, Pairs):
        for i, item in enumerate(value):
            yield from paths(item, (*at, i))


def changed(value: Any, at: Path, change: Callable[[Any], Any]) -> Any:
    """A copy with `change` made at one place."""
    if not at:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(value[at[0]], at[1:], change)
    return copy


def _replace(random: Random, body: dict[str, Any]) -> Any:
    """Another value in some place."""
    new = hostile.anything(random)
    return changed(body, random.choice(list(paths(body))[1:] or [()]), lambda _: new)


def _number(random: Random, body: dict[str, Any]) -> Any:
    """A number at the end of its range, in place of a number."""
    places = [at for at in paths(body) if at and isinstance(_at(body, at), int | float)]
    new = hostile.number(random)
    return changed(body, random.choice(places), lambda _: new) if places else _replace(random, body)


def _text(random: Random, body: dict[str, Any]) -> Any:
    places = [at for at in paths(body) if at and isinstance(_at(body, at), str)]
    new = hostile.text(random)
    return changed(body, random.choice(places), lambda _: new) if places else _replace(random, body)


def _delete(random: Random, body: dict[str, Any]) -> Any:
    at = random.choice(list(paths(body))[1:] or [()])
    if not at:
        return {}

    def without(parent: Any) -> Any:
        if isinstance(parent, dict):
            return {key: value for key, value in parent.items() if key != at[-1]}
        return parent[: at[-1]] + parent[at[-1] + 1 :]

    return changed(body, at[:-1], without)


def _wrap(random: Random, body: dict[str, Any]) -> Any:
    """A value in a list or an object, or the first one of what it holds."""
    return changed(body, random.choice(list(paths(body))), random.choice((lambda v: [v], lambda v: {"a": v}, str)))


def _twice(random: Random, body: dict[str, Any]) -> Any:
    """A key that an object has twice."""
    places = [at for at in paths(body) if isinstance(_at(body, at), dict) and _at(body, at)]
    new = hostile.anything(random)
    if not places:
        return _add(random, body)
    return changed(body, random.choice(places), lambda v: Pairs([*v.items(), (random.choice(list(v)), new)]))


def _repeat(random: Random, body: dict[str, Any]) -> Any:
    """A list that is many times as long."""
    places = [at for at in paths(body) if isinstance(_at(body, at), list) and _at(body, at)]
    times = random.choice((2, 17, 129, 600))
    # Two such mutations must not make a body of millions of values.
    return (
        changed(body, random.choice(places), lambda v: v * min(times, 2 + 3000 // len(v)))
        if places
        else _add(random, body)
    )


#: Fields that a sample may lack: those of other routes and servers, and made up ones.
_FIELDS = (
    "n", "best_of", "logprobs", "top_logprobs", "echo", "suffix", "stop", "seed", "max_tokens", "max_completion_tokens",
    "temperature", "logit_bias", "stream", "stream_options", "slo", "priority", "tools", "tool_choice", "functions",
    "response_format", "structured_outputs", "messages", "prompt", "input", "model", "user", "truncate_prompt_tokens",
    "truncation_side", "prompt_logprobs", "allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids", "documents",
    "chat_template_kwargs", "continue_final_message", "add_generation_prompt", "reasoning", "text", "include", "store",
    "previous_response_id", "conversation", "background", "modalities", "audio", "tokens", "cache_salt", "regex",
    "__class__",
    "metadata", "thinking_token_budget", "guided_x", "choice", "", "\x00", "a.b", "ignore_eos", "return_token_ids",
)  # fmt: skip


def _add(random: Random, body: dict[str, Any]) -> Any:
    return {**body, random.choice(_FIELDS): hostile.anything(random)}


def _structure(random: Random, body: dict[str, Any]) -> Any:
    return {**body, **hostile.structure(random)}


def _slo(random: Random, body: dict[str, Any]) -> Any:
    fields = {name: hostile.anything(random) for name in ("ttft_ms", "tpot_ms", "category") if random.random() < 0.5}
    return {**body, "slo": fields}


def _talk(random: Random, body: dict[str, Any]) -> Any:
    """A long conversation, or turns in an odd order."""
    turn = {
        "role": random.choice(("user", "assistant", "system", "tool", "developer")),
        "content": hostile.text(random),
    }
    field = "input" if "input" in body else "messages"
    given = body.get(field)
    return {**body, field: [*(given if isinstance(given, list) else []), *[turn] * random.choice((1, 2, 40, 400))]}


def _tools(random: Random, body: dict[str, Any]) -> Any:
    """Tools whose parameters are hostile schemas."""
    schema = random.choice((*hostile.SCHEMAS, hostile.nested(random)))
    count = random.choice((1, 2, 127, 129))
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(count)]
    if "input" in body:
        tools = [{"type": "function", **tool["function"]} for tool in tools]
    return {
        **body,
        "tools": tools,
        "tool_choice": random.choice(("auto", "required", {"type": "function", "name": "f0"})),
    }


_WEIGHTS: dict[Callable[[Random, dict[str, Any]], Any], int] = {
    _replace: 8, _number: 6, _text: 6, _delete: 4, _wrap: 3, _twice: 2, _repeat: 3, _add: 8, _structure: 2, _slo: 1,
    _talk: 2,
    _tools: 1,
}  # fmt: skip


#: Values in a body after which it is not mutated again.
_MOST = 20_000


def mutate(random: Random, body: dict[str, Any]) -> Any:
    """The body after one to three mutations."""
    found: Any = body
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if not isinstance(found, dict) or isinstance(found, Pairs) or len(list(paths(found))) > _MOST:
            break
        found = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0](random, found)
    return found


def mangle(random: Random, data: bytes) -> bytes:
    """Bytes that are no longer what they were: flipped, cut, doubled, or text in another encoding."""
    at = random.randrange(len(data) + 1)
    return random.choice((
        lambda: data[:at],
        lambda: data[:at] + bytes([random.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + random.randbytes(random.choice((1, 8, 100))) + data[at:],
        lambda: data + data,
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.decode("utf-8", "replace").encode("utf-16"),
        lambda: data.replace(b":", b"=", 1),
        lambda: data.replace(b'"', b"'"),
        lambda: b"\x1f\x8b\x08" + data,
        lambda: b"\x00" * random.choice((1, 100)) + data,
        lambda: random.randbytes(random.choice((0, 1, 50, 1000))),
    ))()  # fmt: skip


def _at(value: Any, at: Path) -> Any:
    for key in at:
        value = value[key]
    return value
