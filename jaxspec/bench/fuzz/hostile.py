"""Values that programs stumble over."""

from __future__ import annotations

import json
from random import Random
from typing import Any


class Raw(str):
    """JSON text that stands for itself: what Python's values cannot say, such as 1e309 or a thousand brackets."""

    __slots__ = ()


NUMBERS = (
    0, -1, 1, 2, 127, 128, 129, 255, 256, 1000, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63),
    -(2**63) - 1, 0.1, -0.5, 1.5, 1e-320, 1e300, Raw("-0"), Raw("-0.0"), Raw("1e309"), Raw("-1e309"), Raw("1e-400"),
    Raw("NaN"), Raw("Infinity"), Raw("1" + "0" * 400), Raw("9" * 5000), Raw("0." + "3" * 5000), Raw("1E2"), Raw("1.0"),
    Raw("01"), Raw("+1"), Raw("0x10"), Raw("1_000"), Raw(".5"), Raw("1."),
)  # fmt: skip
TEXTS = (
    "", " ", "\x00", "a\x00b", "\u202eright to left", "👩\u200d👩\u200d👧\u200d👦" * 8, "🏳️\u200d🌈", "é" * 50,
    "e" + "\u0301" * 200, "\ufeff",
    "\uffff", "\U0010ffff", "\r\n\r\n", "\x85\xa0", "<|im_end|>", "<|im_start|>system\n", "{{ 7 * 7 }}", "{% for %}",
    "../../etc/passwd", "%s%s%n", "'; drop table x; --", "null", "true", "0", "1e309", "A" * 5000, "ß" * 3000,
    "\ud7ff", "<tool_call>{", "</think>", "data: [DONE]\n\n", "$&`\\", "0" * 1000,
)  # fmt: skip
#: Texts as JSON that a decoder may refuse.
ESCAPES = (
    Raw(r'"\ud800"'), Raw(r'"\udc00"'), Raw(r'"\ud83d\ud83d"'), Raw(r'"\u0000"'), Raw(r'"\x41"'), Raw(r'"\u12"'),
    Raw('"tab\there"'), Raw('"open'), Raw("'single'"),
)  # fmt: skip
REGEXES = (
    "(a+)+$", "(a|a)*b", "(a{1,100}){1,100}", "((a{1,30}){1,30}){1,30}", "[a-z]{0,1000}[a-z]{0,1000}x",
    "(?:a?){60}a{60}",
    "(", "[", "a{5,2}", "\\", "(?=a)b", "(a)\\1", "\\p{Greek}{1,500}", "(?i)" + "ſ" * 50, ".*" * 40, "", "^$",
    "a{100000}",
    "(?P<x>a)(?P<x>b)", "[^\\x00-\\x{10FFFF}]", "(.|\\n)*(.|\\n)*(.|\\n)*x", "(?x) a # b", "\\b\\B",
)  # fmt: skip
SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "string", "minLength": 1, "maxLength": 2**31},
    {"type": "string", "maxLength": 10**6, "minLength": 10**6}, {"type": "array", "minItems": 10**6},
    {"type": "array", "prefixItems": [{}] * 3000}, {"enum": list(range(3000))}, {"enum": ["x" * i for i in range(300)]},
    {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}},
    {"type": "object", "patternProperties": {"(a+)+$": {}}}, {"type": "string", "pattern": "(a+)+(b|b)*$"},
    {"type": "string", "pattern": "(?=x)y"}, {"type": "string", "format": "no-such"}, {"type": "nothing"}, {"type": 5},
    {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"not": {}}, {"const": "\x00"}, {"multipleOf": 0},
    {"type": "number", "multipleOf": 1e-9}, {"minimum": 5, "maximum": 1}, {"minimum": 1e308, "type": "number"},
    {"$ref": "http://127.0.0.1:9/schema.json"}, {"$ref": "file:///etc/passwd"}, {"$id": "x", "$ref": "x#/y/%ff"},
    {"anyOf": []}, {"oneOf": [{}] * 50}, {"properties": []}, {"required": "a"}, {"minProperties": 10**9}, {"if": {},
    "then": 3},
    {"uniqueItems": True, "items": {"enum": [1, 2]}, "minItems": 3}, {"dependentRequired": {"a": ["b"]}},
    {"x-guidance": {}},
    {"type": "integer", "minimum": -(10**30), "maximum": 10**30}, {"const": 2**70}, {"enum": [1.5e300, "\ud800"]},
)  # fmt: skip
GRAMMARS = (
    "start: start", "start: a\na: b\nb: a", "start: /(a+)+$/", 'start: "a" start | ""', 'start: ("a" | "a")*', "start:",
    'root ::= root', 'root ::= "a" root root | ""', 'root ::= [', "start: x", '%llguidance {}\nstart: "a"',
    '%llguidance {"x": 1', 'start: "' + "a" * 3000 + '"', 'start: a{1,100000}\na: "x"', "start: %json {}",
    "start: %json {",
    'start: <|im_end|>', "start: <[5]>", "start: <[99999999]>", "start: /[/",
    "start: a~1..1000\na: b~1..1000\nb: \"c\"",
    "%import common.WORD\nstart: WORD", '%ignore /.*/\nstart: "a"', "start: /.*/ & /~a/", "a" * 2000,
)  # fmt: skip


def number(random: Random) -> Any:
    return random.choice(NUMBERS)


def text(random: Random) -> Any:
    return random.choice((*TEXTS, random.choice(ESCAPES)))


def nested(random: Random) -> Raw:
    """Brackets in brackets."""
    depth = random.choice((3, 50, 200, 900, 1023, 1025, 20_000))
    opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
    inner = random.choice(("1", "null", '"x"', ""))
    return Raw(opening * depth + (inner or "1") + closing * (depth if inner else depth - 1))


def large(random: Random) -> Any:
    """A JSON value with very many parts."""
    count = random.choice((17, 129, 257, 2000))
    return random.choice(
        (["x"] * count, [1] * count, [[1]] * count, "y" * (10 * count), {str(i): 1 for i in range(count)})
    )


def anything(random: Random) -> Any:
    kinds = (number, text, nested, large, lambda _: None, lambda _: True, lambda _: [], lambda _: {}, lambda _: [None])
    return random.choice(kinds)(random)


def structure(random: Random) -> dict[str, Any]:
    """Fields that constrain the output, in one of their many names."""
    schema, regex, grammar = random.choice(SCHEMAS), random.choice(REGEXES), random.choice(GRAMMARS)
    written = json.dumps(schema)
    return random.choice((
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"json": schema}}, {"structured_outputs": {"json": written}}, {"guided_json": written},
        {"structured_outputs": {"regex": regex}}, {"regex": regex}, {"guided_regex": regex},
        {"structured_outputs": {"grammar": grammar}}, {"grammar": grammar}, {"ebnf": grammar},
        {"structured_outputs": {"choice": [random.choice(TEXTS) for _ in range(random.choice((0, 1, 3, 300)))]}},
        {"guided_choice": ["a", "ab", "abc" * 500]}, {"response_format": {"type": "json_object", "schema": schema}},
        {"structured_outputs": {"structural_tag": {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}],
                                                   "triggers": [random.choice(("<a>", "<", "", "b"))]}}},
        {"response_format": {"type": "structural_tag", "format": anything(random)}},
    ))  # fmt: skip
