"""Random JSON schemas whose answers are short, from a seed. Every keyword that llguidance honours occurs."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

#: Levels of objects, arrays and alternatives, without definitions.
DEPTH = 3

_NAMES = ("id", "name", "a b", "né", 'q"', "tags", "x/y", "size", "$v", "kind")
_PATTERNS = ("^[A-Z]{2}[0-9]$", "^(ab|c)+d?$", "^[^a-y]{1,3}$", "^é?.$", r"^\d{3}-\d{4}$", "b$")
_FORMATS = ("ipv4", "ipv6", "uuid", "email", "date", "time", "date-time", "duration", "hostname", "uri")
#: Answers of any length.
_OPEN: tuple[Schema, ...] = (
    {"type": "integer"}, {"type": "number"}, {"type": "number", "minimum": -0.5}, {"type": "string"}, {},
    {"type": "object", "properties": {"id": {"type": "boolean"}}}, {"type": "array", "items": {"type": "null"}},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
)  # fmt: skip
_VALUES = ("red", "né", 'a"b\\', "", 0, -7, 12.5, True, False, None, [1, "x"], {"k": None})


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """`count` schemas, the same for a seed."""
    rng = Random(seed)
    return [_root(rng) for _ in range(count)]


def _root(rng: Random) -> Schema:
    kind = rng.randrange(8)
    if kind == 0:  # a list that ends with null
        node = _object({"v": _leaf(rng), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, ["v"])
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    if kind == 1:  # a tree
        children = {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
        return _object({"v": _leaf(rng), "children": children}, ["v"])
    if kind == 2:  # definitions that use the next one, up to three deep
        levels = 1 + rng.randrange(3)
        defs = {f"d{i}": _object({"v": _leaf(rng), "in": {"$ref": f"#/$defs/d{i + 1}"}}, ["v"]) for i in range(levels)}
        return {"$defs": {**defs, f"d{levels}": _leaf(rng)}, **_object({"top": {"$ref": "#/$defs/d0"}}, ["top"])}
    return _schema(rng, DEPTH)


def _schema(rng: Random, depth: int) -> Schema:
    if depth == 0 or (depth < DEPTH and rng.random() < 0.25):
        return _leaf(rng)
    kind = rng.randrange(7)
    if kind < 3:
        names = rng.sample(_NAMES, rng.randrange(4))
        fields = {name: _schema(rng, depth - 1) for name in names}
        return _object(fields, [name for name in names if rng.random() < 0.6])
    if kind == 3:
        least = rng.randrange(3)
        return {"type": "array", "items": _schema(rng, depth - 1), "minItems": least, "maxItems": least + 2}
    if kind == 4:
        first = [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False}
    if kind == 5:
        return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    # Other keys than those of `properties`.
    more: Schema = {"additionalProperties": _leaf(rng), "maxProperties": 2}
    if rng.random() < 0.5:
        more = {"patternProperties": {"^[a-c]$": _leaf(rng)}, "additionalProperties": False, "maxProperties": 2}
    return {"type": "object", "properties": {"id": _leaf(rng)}, "required": ["id"], **more}


def _object(fields: dict[str, Schema], required: list[str]) -> Schema:
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def _leaf(rng: Random) -> Schema:
    low, least = rng.randrange(-120, 1000), rng.randrange(4)
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"enum": rng.sample(_VALUES, rng.randrange(1, 4))},
            {"const": rng.choice(_VALUES)},
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)},
            {
                "type": "integer",
                "exclusiveMinimum": low,
                "exclusiveMaximum": low + 40,
                "multipleOf": rng.randrange(2, 7),
            },
            {"type": "number", "minimum": low / 4, "maximum": low / 4 + 9, "multipleOf": 0.25},
            {"type": ["string", "null"], "minLength": least, "maxLength": least + rng.randrange(5)},
            {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 8},
            {"type": "string", "format": rng.choice(_FORMATS)},
            {"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^[a-z]*$", "maxLength": 4}]},
            {"oneOf": [{"type": "boolean"}, {"const": "both"}]},
            rng.choice(_OPEN),
        ]
    )
