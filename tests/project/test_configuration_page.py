"""docs/configuration.md has every setting with its default, every value, option, preset and environment variable."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from helpers.paths import CONFIGS, ROOT
from jaxspec.config import EngineConfig, parse_overrides
from jaxspec.serve.__main__ import SETTINGS, _parser

PAGE = ROOT / "docs" / "configuration.md"
TEXT = PAGE.read_text(encoding="utf-8")
SPANS = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)", TEXT)]


def fields(schema: type[BaseModel] = EngineConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(full name, field) of every setting; a section stands for its settings."""
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def tables() -> Iterator[tuple[list[str], list[list[str]]]]:
    """(cells of the header, cells of the rows) of every table."""
    for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
        yield header, rows


def rows(header: str) -> list[list[str]]:
    """The rows of all tables whose first column has this header."""
    return [row for found, rows in tables() if found[0] == header for row in rows]


FIELDS = dict(fields())
ROWS = rows("setting")


def literals(annotation: Any) -> list[Any]:
    """The values of a `Literal`; none for other types."""
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


def code(cell: str) -> str:
    """What the cell's only code span holds."""
    assert re.fullmatch("`[^`]+`", cell), f"{cell} is not a code span"
    return cell.strip("`")


def test_every_setting_has_one_row() -> None:
    listed = Counter(code(row[0]) for row in ROWS)
    assert not [name for name, count in listed.items() if count > 1], "listed twice"
    assert not FIELDS.keys() - listed.keys(), "missing in docs/configuration.md"
    assert not listed.keys() - FIELDS.keys(), "no such setting"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("`"))
def test_its_default_is_true(row: list[str]) -> None:
    assert len(row) == 3, "a row has setting, default and explanation"
    assert row[2]
    shown = yaml.safe_load(code(row[1]))
    real = FIELDS[code(row[0])].get_default(call_default_factory=True)
    assert shown == real and isinstance(shown, bool) == isinstance(real, bool), f"the default is {real!r}"


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if literals(field.annotation)])
def test_every_value_is_explained(name: str) -> None:
    """In a table of its own, or in the setting's row and the paragraphs."""
    values = {str(value) for value in literals(FIELDS[name].annotation)}
    if table := rows(f"`{name}`"):
        assert {code(row[0]) for row in table} == values
    else:
        (row,) = (row for row in ROWS if row[0] == f"`{name}`")
        assert not {value for value in values if not re.search(rf"\b{value}\b", f"{row[1]} {row[2]}")}


def test_settings_in_the_text_exist() -> None:
    """Every `name: value`, `section.name` and `--set name=value` is valid."""
    sections = {name.partition(".")[0] for name in FIELDS if "." in name}
    for span in SPANS:
        if found := re.match(r"--set ([a-z]\S*=\S+)$", span):
            assert EngineConfig.load(None, **parse_overrides([found[1]]))
        elif found := re.match(r"([a-z_]+(?:\.[a-z_]+)*): (.+)", span):
            assert EngineConfig.load(None, **parse_overrides([f"{found[1]}={found[2]}"]))
        elif (found := re.match(r"([a-z_]+)\.[a-z_]+$", span)) and found[1] in sections:
            assert span in FIELDS, span


def test_every_option_of_the_server_is_there() -> None:
    options = {option for action in _parser()._actions for option in action.option_strings if option.startswith("--")}
    shown = {span.split()[0] for span in SPANS if span.startswith("--")}
    assert not options - shown
    assert not shown - options - {"--predictions", "--text", "--renew"}, "no option of the server"


def test_the_defaults_of_options_are_true() -> None:
    defaults = {option: action.default for action in _parser()._actions for option in action.option_strings}
    defaults |= {"--model": EngineConfig().model, "--draft": "auto", "--api-key": "$JAXSPEC_API_KEY"}
    assert EngineConfig().draft == ["auto"]
    for option, default, _ in rows("option"):
        name = code(option).split()[0]
        if name not in ("--config", "--set", "--help"):
            assert yaml.safe_load(code(default)) == defaults[name], name
    listed = {code(option).split()[0] for option, *_ in rows("option")}
    assert not listed & {f"--{name.replace('_', '-')}" for name in SETTINGS}, "listed as settings"


def test_every_preset_is_listed() -> None:
    listed = [name for row in rows("preset") for name in re.findall("`([a-z_]+)`", row[0])]
    assert sorted(listed) == sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def test_every_environment_variable_is_listed() -> None:
    read = re.compile(r'(?:environ\.get\(|environ\[|getenv\()"(\w+)"')
    files = [path for folder in ("jaxspec", "models", "sched") for path in (ROOT / folder).rglob("*.[cp]*")]
    used = {name for path in files if path.suffix in (".py", ".c") for name in read.findall(path.read_text("utf-8"))}
    assert {"JAXSPEC_CACHE", "JAXSPEC_THREADS", "CC"} <= used
    assert not used - {code(row[0]) for row in rows("variable")}


# Presets


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_says_what_it_is(path: Path) -> None:
    """It begins with a comment; the commands in it are of this file, with valid settings."""
    header = path.read_text(encoding="utf-8").splitlines()
    assert re.match("# [A-Z]", header[0])
    for line in header:
        if line.startswith("#   python -m jaxspec.serve "):
            args = _parser().parse_args(shlex.split(line)[4:])
            assert args.config == path.relative_to(ROOT).as_posix()
            assert EngineConfig.load(ROOT / args.config, **parse_overrides(args.set))
        for pair in re.findall(r"--set (\S+?=\S+?)[,.]?(?=\s|$)", line):
            assert EngineConfig.load(path, **parse_overrides([pair]))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_states_only_what_differs(path: Path) -> None:
    """Except `default.yaml`, which shows the settings most worth knowing."""
    stated = yaml.safe_load(path.read_text(encoding="utf-8"))
    config, defaults = EngineConfig.load(path), EngineConfig()
    restated = [name for name in _stated(stated) if attrgetter(name)(config) == attrgetter(name)(defaults)]
    assert not restated or path.stem == "default", f"these are the defaults: {restated}"


def _stated(mapping: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Full names of the settings in a preset."""
    for key, value in mapping.items():
        if prefix + key in FIELDS:
            yield prefix + key
        else:
            yield from _stated(value, f"{prefix}{key}.")
