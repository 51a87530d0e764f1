"""Finds the commands and Python snippets in the pages: indented and fenced blocks, and code spans.

The docstrings of the examples count as pages.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from helpers.paths import ROOT

PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.py")),
]  # fmt: skip

#: First words of commands, after any NAME=VALUE.
PROGRAMS = frozenset(
    {
        "python",
        "python3",
        "jaxspec",
        "make",
        "curl",
        "pip",
        "pre-commit",
        "git",
        "source",
        "serve",
        "ray",
        "docker",
        ".ci/run",
    }
)
#: Languages of fenced blocks: shell, and those that hold neither commands nor Python.
SHELL = frozenset({"sh", "bash", "shell", "console"})
OTHER = frozenset({"mermaid", "json", "yaml", "text", "c"})

#: Code spans that name a program and are no command.
_NAMES = frozenset({"jaxspec", ".venv/bin/jaxspec", "python3", "serve", "ray"})
_VENV = re.compile(r"^\.venv(-lint)?/bin/")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_FENCE = re.compile(r"```(\w*)\s*$")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A block of lines or one code span; `line` is the number of its first line in the page."""

    page: str
    line: int
    text: str
    language: str = ""

    @property
    def place(self) -> str:
        return f"{self.page} line {self.line}"


@dataclass(frozen=True)
class Command:
    """One command as written, on one or several lines."""

    page: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page} line {self.line}"

    @cached_property
    def words(self) -> list[str]:
        """Words as a shell reads them: quotes removed, braces expanded, comments dropped. The command is not run.

        Raises `ValueError` for pipes, redirections, variables and several commands on a line.
        """
        signs = [
            t
            for t in shlex.shlex(self.text, posix=True, punctuation_chars=";|&<>$")
            if t and not set(t) - set(";|&<>$")
        ]
        if signs or "$(" in self.text:
            raise ValueError(f"{self.place}: more than a command, {signs}; write one a line, without variables")
        shown = subprocess.run(
            ["bash", "-c", f"printf '%s\\0' {self.text}"], capture_output=True, check=True, text=True
        )
        return shown.stdout.split("\0")[:-1]

    def begins(self, beginning: str) -> bool:
        """Whether `called` begins with these words."""
        return f"{self.called} ".startswith(f"{beginning} ")

    @property
    def environment(self) -> dict[str, str]:
        """The NAME=VALUE pairs before the program."""
        return dict(word.split("=", 1) for word in self.words[: self._begin])

    @property
    def arguments(self) -> list[str]:
        """Program and arguments, without `.venv/bin/`: the tests use their own Python."""
        program, *rest = self.words[self._begin :]
        return [_VENV.sub("", program), *rest]

    @property
    def called(self) -> str:
        """The normalised command: `jaxspec.bench offline …` for both `python -m` and the console command."""
        words = self.arguments
        if words[:2] == ["python", "-m"]:
            words = words[2:]
        elif words[0] == "jaxspec" and len(words) > 1:
            words = [f"jaxspec.{words[1].replace('-', '_')}", *words[2:]]
        elif words == ["make"]:
            words = ["make", "help"]  # its default
        return shlex.join(words)

    @property
    def _begin(self) -> int:
        return next(i for i, word in enumerate(self.words) if not _ASSIGNMENT.fullmatch(word))


def blocks(page: Path) -> Iterator[Block]:
    """Indented and fenced blocks."""
    name, lines = page.relative_to(ROOT).as_posix(), _lines(page)
    for begin, end, language in _extents(lines):
        text = "\n".join(line.removeprefix("    ") if language is None else line for line in lines[begin:end])
        yield Block(name, begin + 1, text.rstrip(), language or "")


def spans(page: Path) -> Iterator[Block]:
    """Code spans of the text between blocks; a span may continue on the next line."""
    name, lines = page.relative_to(ROOT).as_posix(), _lines(page)
    for begin, end, language in _extents(lines):
        fence = 0 if language is None else 1
        lines[begin - fence : end + fence] = [""] * (end - begin + 2 * fence)
    text = "\n".join(lines)
    for paragraph in re.finditer(r"(?:^.+\n?)+", text, re.MULTILINE):
        for span in _SPAN.finditer(paragraph[0]):
            line = text.count("\n", 0, paragraph.start() + span.start()) + 1
            yield Block(name, line, " ".join(span[1].split()))


def commands_of(block: Block) -> list[Command] | None:
    """The commands of a block; None if it holds something else."""
    if block.language in OTHER or not (block.language in SHELL or _program(block.text) in PROGRAMS):
        return None
    if block.text in _NAMES:
        return None
    return [Command(block.page, block.line + at, text) for at, text in _entries(block.text.splitlines())]


def is_python(block: Block) -> bool:
    if block.language in ("python", "py"):
        return True
    if block.language or _program(block.text) in PROGRAMS:
        return False
    try:
        ast.parse(block.text)
    except SyntaxError:
        return False
    return True


def shell_blocks() -> list[list[Command]]:
    """The commands of every block; a span that is a whole command is a block of its own."""
    found = [commands_of(block) for page in PAGES for block in blocks(page)]
    inline = [commands_of(span) for page in PAGES for span in spans(page)]
    return [own for own in (*found, *inline) if own]


def commands() -> list[Command]:
    return [command for block in shell_blocks() for command in block]


def snippets() -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if is_python(block)]


def other_blocks() -> list[Block]:
    """Blocks without a language that hold neither commands nor Python."""
    every = [block for page in PAGES for block in blocks(page) if block.language not in OTHER]
    return [block for block in every if commands_of(block) is None and not is_python(block)]


def _lines(page: Path) -> list[str]:
    """The lines of a page; of a Python file those of its docstring, which begins on line 1."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".py":
        text = ast.get_docstring(ast.parse(text), clean=False) or ""
    return text.splitlines()


def _extents(lines: Sequence[str]) -> Iterator[tuple[int, int, str | None]]:
    """(first line, line after the last, language) of every block; the language of an indented block is None."""
    at = 0
    while at < len(lines):
        if fence := _FENCE.match(lines[at]):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith("```"))
            yield at + 1, end, fence[1]
            at = end
        elif lines[at].startswith("    ") and not (at and lines[at - 1].strip()):
            end = next((i for i in range(at, len(lines)) if not lines[i].startswith("    ")), len(lines))
            yield at, end, None
            at = end - 1
        at += 1


def _entries(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(line, command) pairs; a command continues after a backslash and inside quotes."""
    begin, text = 0, ""
    for at, line in enumerate(lines):
        if not text and not line.strip():
            continue
        begin = begin if text else at
        text = f"{text}\n{line}" if text else line
        if not line.endswith("\\") and _closed(text):
            yield begin, text.replace("\\\n", " ")
            text = ""
    if text:
        yield begin, text


def _closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _program(text: str) -> str:
    """The first word that is not NAME=VALUE, without the folder of the virtual environment."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        words = text.split()
    named = next((word for word in words if not _ASSIGNMENT.fullmatch(word)), "")
    return _VENV.sub("", named)
