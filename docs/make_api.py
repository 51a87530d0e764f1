"""Writes docs/api.md from the docstrings: `python docs/make_api.py`. A test fails while the page is out of date."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).parent / "api.md"
#: Section -> `module:name`, for classes with the methods to list.
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Offline": {
        "jaxspec.llm:LLM": ("generate", "chat", "get_default_sampling_params", "close"),
        "jaxspec.async_llm:AsyncLLM": ("generate", "close"),
        "jaxspec.sampling_params:SamplingParams": (),
        "jaxspec.structured_outputs:StructuredOutputs": (),
        "jaxspec.outputs:RequestOutput": (),
        "jaxspec.outputs:CompletionOutput": (),
        "jaxspec.outputs:TokenLogprob": (),
        "jaxspec.outputs:RequestMetrics": (),
    },
    "Engine": {
        "jaxspec.engine.engine:Engine": ("start", "submit", "cancel", "check", "stats", "watch", "shutdown"),
        "jaxspec.outputs:OutputDelta": (),
        "jaxspec.config:EngineConfig": ("load",),
    },
    "Errors": {
        "jaxspec.errors:InvalidRequest": (),
        "jaxspec.config:ConfigError": (),
        "jaxspec.errors:ModelLoadError": (),
        "jaxspec.errors:EngineDead": (),
        "jaxspec.errors:EngineDraining": (),
        "jaxspec.sched.scheduler:QueueFull": (),
        "jaxspec.sched.admission:SloRefused": (),
    },
    "Scheduler and simulator": {
        "jaxspec.sched.scheduler:Scheduler": ("add", "plan", "update", "predicted", "cancel", "wake"),
        "jaxspec.sched.config:SchedulerConfig": (),
        "jaxspec.sched.request:Request": (),
        "jaxspec.sched.plan:Plan": (),
        "jaxspec.sched.plan:ScheduledRequest": (),
        "jaxspec.sched.plan:RequestResult": (),
        "jaxspec.sched.order.order:Order": ("build", "key", "preempts", "preemptible", "observe"),
        "jaxspec.sched.sim.simulator:Simulation": ("run",),
        "jaxspec.sched.sim.cluster:Cluster": ("run",),
    },
    "Routing": {
        "jaxspec.sched.routing.router:Router": ("add", "remove", "update", "check", "route", "first_token", "ended"),
        "jaxspec.sched.routing.routing:Routing": ("choose",),
        "jaxspec.sched.routing.request:RoutedRequest": (),
        "jaxspec.sched.routing.report:ReplicaReport": (),
        "jaxspec.sched.routing.health:HealthSettings": (),
        "jaxspec.sched.routing.routing:NoReplica": (),
    },
}


def page() -> str:
    """The whole page."""
    lines = [
        "# API",
        "",
        "Made from the docstrings by `python docs/make_api.py`. Settings of `EngineConfig` are in "
        "[configuration](configuration.md), words in the [glossary](glossary.md).",
        "",
    ]
    for title, entries in SECTIONS.items():
        lines += [f"## {title}", ""]
        for path, methods in entries.items():
            module, name = path.split(":")
            lines += entry(module, getattr(import_module(module), name), methods)
    return "\n".join(lines)


def entry(module: str, cls: type, methods: tuple[str, ...]) -> Iterator[str]:
    """One class: its docstring, fields and methods."""
    yield from (f"### `{module}.{cls.__name__}`", "", *_doc(cls), "")
    if cls.__name__ != "EngineConfig" and (fields := list(_fields(cls))):
        yield from ("| field | type and default | |", "|---|---|---|", *fields, "")
    for name in methods:
        method = inspect.getattr_static(cls, name)
        function = getattr(method, "__func__", method)
        signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
        signature = re.sub(r"<[^<]*(<[^>]*>[^<]*)*? at 0x[0-9a-f]+>", "…", signature)
        head = name + re.sub(r"^\((self|cls)(, )?(/, )?", "(", signature)
        yield from ("```text", *textwrap.wrap(head, 110, subsequent_indent="    "), "```", "")
        yield from (*_doc(function), "")


def _doc(thing: object) -> list[str]:
    return (inspect.getdoc(thing) or "").splitlines()


def _fields(cls: type) -> Iterator[str]:
    """Table rows of a data class: annotations in its source, with the `#:` or trailing comment of each."""
    if not is_dataclass(cls):
        return
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign):
            continue
        comment: list[str] = []
        at = node.lineno - 2
        while lines[at].strip().startswith("#:"):
            comment.insert(0, lines[at].strip().removeprefix("#:").strip())
            at -= 1
        value = "" if node.value is None else f" = {ast.unparse(node.value)}"
        kind = f"`{ast.unparse(node.annotation)}{value}`".replace("|", "\\|")
        yield f"| `{ast.unparse(node.target)}` | {kind} | {' '.join(comment).replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
