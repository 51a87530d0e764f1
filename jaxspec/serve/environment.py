"""Options of the server as environment variables: `--max-model-len` is `JAXSPEC_MAX_MODEL_LEN`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

_PREFIX = "JAXSPEC_"
#: Read elsewhere: they belong to no option of the server.
_OTHERS = ("JAXSPEC_CACHE", "JAXSPEC_THREADS")
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
#: What Kubernetes sets in the containers next to a service named jaxspec; JAXSPEC_PORT is then the service's URL.
_KUBERNETES = re.compile(r"JAXSPEC_(SERVICE_(HOST|PORT)|PORT_\d+_)")
_URL = re.compile(r"(tcp|udp|sctp)://")


def variable(dest: str) -> str:
    """The variable of the option with this destination."""
    return _PREFIX + dest.upper()


def read(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> dict[str, Any]:
    """Values by destination of the options that have a variable. An empty variable counts as unset.

    Raises `ValueError` naming the variable if its value is not one of the option's.
    """
    given: dict[str, Any] = {}
    for action in _options(parser):
        name = variable(action.dest)
        text = environ.get(name, "").strip()
        if text and not (name == "JAXSPEC_PORT" and _URL.match(text)):
            try:
                given[action.dest] = _value(action, text)
            except (argparse.ArgumentTypeError, ValueError) as e:
                raise ValueError(f"{name}: {e}") from None
    return given


def unknown(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that nothing reads, each with the name that it may stand for."""
    known = [*(variable(action.dest) for action in _options(parser)), *_OTHERS]
    names = sorted(n for n in environ if n.startswith(_PREFIX) and n not in known and not _KUBERNETES.match(n))
    words = [name.removeprefix(_PREFIX) for name in known]
    near = {name: get_close_matches(name.removeprefix(_PREFIX), words, n=1, cutoff=0.75) for name in names}
    return [f"{name} (did you mean {_PREFIX}{near[name][0]}?)" if near[name] else name for name in names]


def blamed(message: str, given: Mapping[str, Any]) -> str:
    """A `ConfigError`'s message, with the variables in front whose settings it names."""
    settings = [(dest, dest) for dest in given] + [("set", pair.partition("=")[0]) for pair in given.get("set", ())]
    places = r"(^|; |unknown setting '|cannot read |got ')"
    names = dict.fromkeys(
        variable(dest) for dest, name in settings if re.search(rf"{places}{re.escape(name)}\b", message)
    )
    return ": ".join(filter(None, (", ".join(names), message)))


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.option_strings and action.dest != "help")


def _value(action: argparse.Action, text: str) -> Any:
    """Several values are separated by spaces. Raises `ValueError` or `ArgumentTypeError`."""
    if action.nargs == 0:  # a switch
        if text.lower() not in _SWITCH:
            raise ValueError(f"must be one of {', '.join(_SWITCH)}, got {text!r}")
        return _SWITCH[text.lower()]
    if action.choices is not None and text not in action.choices:
        raise ValueError(f"must be one of {', '.join(action.choices)}, got {text!r}")
    convert = action.type if callable(action.type) else str
    if action.nargs == "+" or isinstance(action, argparse._AppendAction):
        return [convert(word) for word in text.split()]
    return convert(text)
