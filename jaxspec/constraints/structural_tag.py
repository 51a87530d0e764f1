"""Structural tags: free text in which tags begin parts that match JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.constraints.lark import HEADER, TEXT, head_rule, json_rule, token_or_text

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer


def structural_tag_grammar(tag: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """The Lark grammar of vLLM's and SGLang's `{"structures": [{"begin", "schema", "end"}], "triggers": […]}`.

    The output is any text until a trigger occurs; then one of the structures whose `begin` begins with it must follow.
    Raises `ValueError` saying what is wrong with it.
    """
    if "format" in tag:
        raise ValueError("has a format, which is not supported; use structures and triggers")
    triggers, structures = _list(tag, "triggers"), _list(tag, "structures")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("triggers must be strings that are not empty")
    if any(a != b and a.startswith(b) for a in triggers for b in triggers):
        raise ValueError("has triggers of which one is the beginning of another")
    rules, used = [HEADER, TEXT], []
    for i, structure in enumerate(structures):
        begin, end = _text(structure, i, "begin"), _text(structure, i, "end")
        schema = structure.get("schema", True)
        if not isinstance(schema, (dict, bool)):
            raise ValueError(f"structures[{i}].schema must be a schema, which is an object or a boolean")
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"structures[{i}].begin must begin with one of the triggers")
        used.append(trigger)
        parts = [token_or_text(part, tokenizer) for part in (begin.removeprefix(trigger), end)]
        before, after = (part if part != '""' else "" for part in parts)
        rules += [json_rule(f"body_{i}", schema), f"tag_{i}: head_{triggers.index(trigger)} {before} body_{i} {after}"]
    for k, trigger in enumerate(triggers):
        if trigger not in used:
            raise ValueError(f"triggers[{k}] begins no structure")
        rules.append(head_rule(f"head_{k}", trigger, tokenizer))
    tags = " | ".join(f"tag_{i}" for i in range(len(structures)))
    return "\n".join([*rules, f"start: ({tags})* tail", "tail: TEXT"])


def _list(tag: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(value := tag.get(name), list) or not value:
        raise ValueError(f"needs {name}, a list that is not empty")
    return value


def _text(structure: Any, i: int, name: str) -> str:
    value = structure.get(name) if isinstance(structure, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"structures[{i}].{name} must be a string")
    return value
