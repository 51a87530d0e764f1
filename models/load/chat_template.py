"""Chat templates. They come with a model, and clients write what they show: neither may run code, or work without end.

A template runs in jinja2's sandbox, without a loader, so it reads no files. Each rendering has a budget of work, from
which loops, calls, filters and all that is written are paid, and a time. What could make a large value at once is
checked before.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from types import BuiltinFunctionType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

#: Most characters of a template, and of a value in it.
MAX_SOURCE, MAX_VALUE = 2**18, 2**24
#: Characters that a rendering may write, also into variables; a step of a loop or a call costs as much as `_STEP`.
BUDGET = 2**27
#: Seconds of a rendering. Usual ones take less than a millisecond.
SECONDS = 10.0
_STEP = 64
#: Numbers that a format or a width may have.
_WIDE_PERCENT, _WIDE_BRACES = (
    re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*(\*|\d{5,})"),
    re.compile(r"\{[^{}]*(:[^{}]*\{|\d{5,})"),
)
#: Filters and globals that make long texts or odd work, and that no chat template needs.
_LEFT_OUT = ("batch", "pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr")


#: Filters and methods whose numbers are widths, and filters that make a text of any value.
_WIDTHS = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "round", "tojson", "truncate", "format",
           "to_bytes")  # fmt: skip
_TEXTS = ("string", "safe", "escape", "e", "forceescape", "urlencode", "format", "center", "upper", "lower",
          "capitalize", "title", "trim", "replace", "indent", "wordcount", "truncate", "tojson")  # fmt: skip


class TooMuchWork(TemplateError):
    """A rendering has used up its budget."""


class _Work:
    """What is left of a rendering's budget."""

    def __init__(self) -> None:
        self._left, self._end = BUDGET, time.monotonic() + SECONDS

    def spend(self, characters: int = 0) -> None:
        """Pay for a step that writes this many characters. Raises `TooMuchWork`."""
        self._left -= _STEP + characters
        if self._left < 0 or characters > MAX_VALUE or time.monotonic() > self._end:
            raise TooMuchWork("it takes too much work or memory")


_work: ContextVar[_Work] = ContextVar("_work")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks text to train on. Here the tags are ignored."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Counting(NodeTransformer):
    """Lets loops, slices, comparisons and `~` go through filters that count."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for side in (node, *node.ops):
            side.expr = nodes.Filter(side.expr, "_measured", [], [], None, None, lineno=node.lineno)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        return nodes.Filter(node, "_sliced", [], [], None, None, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        whole = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(whole, "_joined", [], [], None, None, lineno=node.lineno)


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _work.get().spend()
        yield value


def _sliced(value: Any) -> Any:
    _work.get().spend(_length(value))
    return value


def _joined(values: Iterable[Any]) -> str:
    """Concatenate values as text."""
    parts: list[str] = []
    for value in values:
        parts.append(str(_measured(value)))
        _work.get().spend(len(parts[-1]))
    return "".join(parts)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **kwargs: Any) -> str:
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **kwargs)
    # Indentation may be much longer than the value.
    return encoder.encode(value) if indent is None else _joined(encoder.iterencode(value))


def _measure(value: Any) -> int:
    """About the characters of the value as text. Each of its parts is paid, also where parts are shared."""
    if isinstance(value, str | bytes):
        return len(value)
    _work.get().spend()
    if isinstance(value, Mapping):
        return sum(_measure(key) + _measure(part) for key, part in value.items())
    return sum(map(_measure, value)) if isinstance(value, list | tuple | set) else 16


def _measured(value: Any) -> Any:
    """Charge the work limit for a list or mapping that is compared or becomes text. -> the value."""
    if isinstance(value, Mapping | list | tuple | set) and _work.get(None) is not None:
        _work.get().spend(_measure(value))
    return value


def _length(value: Any) -> int:
    """Characters that the value counts as."""
    if isinstance(value, str | bytes):
        return len(value)
    return 16 * len(value) if isinstance(value, list | tuple) else 0


def _check_call(name: str, value: Any, given: Sequence[Any]) -> None:
    """Raises `TooMuchWork` if a filter or method of `value` would write too much. name: of the filter or method."""
    work, numbers = _work.get(), [abs(n) for n in given if isinstance(n, int)]
    texts = [text for text in given if isinstance(text, str)]
    if numbers and name in _WIDTHS and max(numbers) > (1000 if name in ("round", "tojson") else MAX_VALUE):
        raise TooMuchWork(f"{name} of {max(numbers):.3g}")
    if name == "translate":
        raise TooMuchWork("translate is not supported")
    if not isinstance(value, str):
        return
    if name == "replace" and len(texts) > 1:  # by name they may come in any order
        work.spend(max(value.count(old) * len(new) for old, new in (texts[:2], texts[1::-1])))
    elif name == "indent":
        work.spend((value.count("\n") + 1) * max([4, *numbers, *map(len, texts)]))
    elif name == "expandtabs":
        work.spend(value.count("\t") * max([8, *numbers]))
    elif (name == "format" and _WIDE_PERCENT.search(value)) or (
        name in ("format", "format_map") and _WIDE_BRACES.search(value)
    ):
        raise TooMuchWork("a width in a format")
    if name in ("format", "format_map"):
        work.spend((value.count("%") + value.count("{")) * max([0, *map(_measure, given)]))


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its work paid."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        value, given = args[first], [*args[first + 1 :], *kwargs.values()]
        if name == "join":
            items = list(value) if isinstance(value, Iterable) else [value]
            _work.get().spend(sum(map(_measure, items)) + len(items) * max([0, *map(_length, given)]))
            args = (*args[:first], items, *args[first + 1 :])
        elif name == "sum" and any(isinstance(one, list | tuple) for one in given):  # its start
            raise TooMuchWork("sum of lists")
        elif name in _TEXTS:
            _measured(value)
        _check_call(name, value, given)
        result = function(*args, **kwargs)
        _work.get().spend(_length(result))
        return result

    return paid


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which everything is paid from the rendering's budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # Not optimised: constants would be computed when the template is compiled, without a budget.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols],
            finalize=_measured,
        )  # fmt: skip
        filters = {**self.filters, "tojson": _tojson}
        self.filters = {name: _paid(name, filters[name]) for name in filters if name not in _LEFT_OUT}
        self.filters |= {"_counted": _counted, "_joined": _joined, "_sliced": _sliced, "_measured": _measured}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals.pop("lipsum")
        self.concat = _joined  # pyright: ignore[reportAttributeAccessIssue]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        work = _work.get()
        sizes, numbers = [_length(left), _length(right)], [n for n in (left, right) if isinstance(n, int)]
        if operator == "+":  # a text that grows by pieces is copied fast
            work.spend(min(sizes) + max(sizes) // 64)
            if sum(sizes) > MAX_VALUE:
                raise TooMuchWork("a value that is too large")
        elif operator == "*" and numbers:
            work.spend(max(sizes) * max(1, *map(abs, numbers)))
        elif operator == "%" and isinstance(left, str):
            _check_call("format", left, right if isinstance(right, tuple) else (right,))
        if len(numbers) == 2 and operator in "**":
            bits, other = abs(numbers[0]).bit_length(), abs(numbers[1])
            if (bits * other if operator == "**" else bits + other.bit_length()) > MAX_VALUE // 1024:
                raise TooMuchWork("a number of thousands of digits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        name = getattr(obj, "__name__", "")
        if isinstance(obj, BuiltinFunctionType) or isinstance(getattr(obj, "__self__", None), str):
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
                _work.get().spend(sum(map(_measure, args[0])) + len(args[0]) * _length(obj.__self__))
            _check_call(name, obj.__self__, [*args, *kwargs.values()])
        elif name in ("format", "format_map"):  # the sandbox's own
            _check_call("format", getattr(getattr(obj, "__wrapped__", obj), "__self__", ""), [*args, *kwargs.values()])
        result = super().call(context, obj, *args, **kwargs)
        _work.get().spend(_length(result))
        return result


class ChatTemplate:
    """A compiled chat template. Raises `ValueError` if the source is not valid."""

    def __init__(self, source: str):
        if len(source) > MAX_SOURCE:
            raise ValueError(f"the model's chat template has {len(source):,} characters; {MAX_SOURCE:,} are the most")
        environment = _Environment()
        try:
            tree = _Counting().visit(environment.parse(source))
            self._template = environment.from_string(tree)
        except (TemplateError, SyntaxError, ValueError, RecursionError, OverflowError, MemoryError) as e:
            raise ValueError(f"the model's chat template is not valid: {_first_line(e)}") from e

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render a conversation to a prompt. Raises `ValueError` with the template's message if it refuses, and if it
        takes more than `BUDGET` or `SECONDS`."""
        token = _work.set(_Work())
        try:
            return self._template.render(messages=messages, **variables)
        except RecursionError:
            raise ValueError("the chat template can't render these messages: they are nested too deeply") from None
        except (TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as e:
            raise ValueError(f"the chat template can't render these messages: {_first_line(e)}") from e
        finally:
            _work.reset(token)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:500]
