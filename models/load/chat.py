"""Chat templates, rendered in a sandbox: a template comes with the model and is not trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a trainer learns from; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **kwargs: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


class ChatTemplate:
    """A compiled template. Raises `ValueError` when the source isn't valid."""

    def __init__(self, source: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except TemplateError as e:
            raise ValueError(f"the model's chat template is not valid: {e}") from e

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt of a conversation. Raises `ValueError` with the template's own words when it refuses."""
        try:
            return self._template.render(messages=messages, **variables)
        except (TemplateError, TypeError, KeyError, AttributeError, IndexError, ValueError, OverflowError) as e:
            raise ValueError(f"the chat template can't render these messages: {e}") from e
