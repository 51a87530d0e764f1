"""Parts of grammars in llguidance's variant of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.constraints.json_schema import WHITESPACE, with_options

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer

#: Declares llguidance's variant of Lark, with the terminal `WS`.
HEADER = f"%llguidance {{}}\nWS: /{WHITESPACE}/"


def json_rule(name: str, schema: Mapping[str, Any] | bool) -> str:
    """The rule `name` for JSON values of the schema. Raises `ValueError`: see `with_options`."""
    return f"{name}: %json {with_options(schema)}"


def token_or_text(text: str, tokenizer: Tokenizer) -> str:
    """A tag as an operand of a rule: by its id if it is a special token, whose text a grammar does not see."""
    id = tokenizer.special_id(text)
    return json.dumps(text) if id is None else f"<[{id}]>"


#: The terminal `TEXT`: any text.
TEXT = r"TEXT: /(.|\n)*/"


def head_rule(name: str, mark: str, tokenizer: Tokenizer) -> str:
    """The rule `name`: a text up to and with the first `mark`."""
    tag = token_or_text(mark, tokenizer)
    # Text is matched lazily, a special token cannot be part of it.
    return f"{name}: TEXT {tag}" if tag.startswith("<") else f"{name}[lazy]: TEXT {tag}"
