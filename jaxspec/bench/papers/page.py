"""A paper's page: generated tables between marks in a hand-written Markdown file, and the JSON file of the numbers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.bench import BenchError
from jaxspec.bench.papers.runs import Runs
from jaxspec.bench.report import write_json
from jaxspec.bench.sections import write
from jaxspec.errors import explained

#: From all kept numbers to the tables of a page, by name.
Sections = Callable[[Mapping[str, Any]], dict[str, str]]


def keep(path: Path, kind: str, numbers: dict[str, Any], copy: str | None) -> dict[str, Any]:
    """Merge `numbers` as `kind` ("simulated", "engine", …) into the file at `path`, and return all of them.

    copy: path of a second file with all numbers. Raises `BenchError` if the file is not JSON.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise BenchError(f"{path} does not hold an earlier run's numbers: {error}") from None
    kept[kind] = json.loads(json.dumps(numbers))  # keys become text, as when read from the file
    write_json(path, kept)
    if copy:
        write_json(copy, kept)
    return kept


def publish(
    args: argparse.Namespace, name: str, title: str, kind: str, numbers: dict[str, Any], sections: Sections
) -> dict[str, Any]:
    """Keep the numbers, write the tables of all of them into the page, and return them. Raises `BenchError`."""
    out = Path(args.out)
    kept = keep(out / f"{name}.json", kind, numbers, args.json)
    write(out / f"{name}.md", title, sections(kept))
    return kept


@dataclass(frozen=True, slots=True)
class File:
    """A file of data: its place in the folder of `--data`, and what it holds."""

    default: str
    metavar: str
    help: str


def add_files(parser: argparse.ArgumentParser, files: Mapping[str, File]) -> None:
    """Add an option for each file."""
    group = parser.add_argument_group("data", "files that replace those in the folder of --data")
    for name, file in files.items():
        option, default = f"--{name.replace('_', '-')}", f"DATA/{file.default}"
        group.add_argument(option, metavar=file.metavar, help=f"{file.help} (default: {default})")


def find_files(args: argparse.Namespace, files: Mapping[str, File]) -> None:
    """Set the options of files that are not given. Raises `BenchError` naming one that is missing."""
    for name, file in files.items():
        if getattr(args, name) is None:
            if args.data is None:
                raise BenchError(f"give the data: --data DIR, or --{name.replace('_', '-')} {file.metavar}")
            setattr(args, name, str(Path(args.data) / file.default))


def runs(args: argparse.Namespace) -> Runs:
    """The runs of `args.paper`'s simulations, with the results kept in the folder of `--keep`."""
    return Runs(Path(args.keep) / f"{args.paper}.jsonl", args.processes)


def run(
    args: argparse.Namespace, title: str, files: Mapping[str, File], read: Callable[..., Sequence[Any]],
    simulated: Callable[..., dict[str, Any]], on_engine: Callable[..., dict[str, Any]], sections: Sections,
    draw: Callable[[Path, dict[str, Any]], None],
) -> int:  # fmt: skip
    """Run a paper's experiments on the data that `read(args)` returns; publish and draw.

    Calls `simulated(args, runs, *data)` or `on_engine(args, *data)`. Raises `BenchError` if the data cannot be read or
    a run fails.
    """
    find_files(args, files)
    try:
        data = read(args)
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    if args.engine:
        publish(args, args.paper, title, "engine", on_engine(args, *data), sections)
        return 0
    kept = publish(args, args.paper, title, "simulated", simulated(args, runs(args), *data), sections)
    draw(Path(args.out), kept["simulated"])
    return 0
