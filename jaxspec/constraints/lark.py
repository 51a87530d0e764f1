"""Parts of grammars in llguidance's variant of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer

#: Whitespace within JSON. Without a bound, small models write nothing else until they are cut.
WHITESPACE = r"[ \n\t\r]{0,32}"
#: Declares llguidance's variant of Lark, with the terminal `WS`.
HEADER = f"%llguidance {{}}\nWS: /{WHITESPACE}/"


def json_rule(name: str, schema: Mapping[str, Any] | bool) -> str:
    """The rule `name` for JSON values of the schema."""
    return f"{name}: %json {json.dumps(with_whitespace(schema))}"


def with_whitespace(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """The schema with our bound on whitespace."""
    as_mapping = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    return as_mapping | {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def token_or_text(text: str, tokenizer: Tokenizer) -> str:
    """A tag as an operand of a rule: by its id if it is a special token, whose text a grammar does not see."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return f"<[{ids[0]}]>" if len(ids) == 1 and ids[0] in tokenizer.special_ids else json.dumps(text)


def text_rules(mark: str, tokenizer: Tokenizer) -> list[str]:
    """The terminal `TEXT`, any text, and the rule `head`, a text up to and with the first `mark`."""
    tag = token_or_text(mark, tokenizer)
    head = f"head: TEXT {tag}" if tag.startswith("<") else f"head[lazy]: TEXT {tag}"
    return [r"TEXT: /(.|\n)*/", head]
