"""Every command and every piece of Python in the pages is run by a test, or there is a reason why not."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from helpers import doc_commands
from helpers.doc_commands import ROOT, Block, Command, commands, commands_of, is_python, other_blocks, snippets, spans
from helpers.doc_runs import dry, main_of, size_of
from helpers.doc_sizes import CHECKED, NO_COMMANDS, OWN_TESTS, RUNS

COMMANDS = commands()
MAKE = [command for command in COMMANDS if command.begins("make")]


def reason(command: Command) -> str | None:
    """Where it is taken care of other than by `RUNS`, by the beginning that stands there."""
    return next((beginning for beginning in (*CHECKED, *OWN_TESTS) if command.begins(beginning)), None)


def test_every_command_is_covered() -> None:
    missing = [f"{c.place}: command not covered: {c.called}" for c in COMMANDS if not (size_of(c) or reason(c))]
    assert not missing, "\n".join(
        [
            *missing,
            "Add to tests/helpers/doc_sizes.py how it is run at a small size (RUNS), or why it cannot be (CHECKED).",
        ]
    )


def test_every_block_is_understood() -> None:
    strange = [b for b in other_blocks() if (b.page, b.text.splitlines()[0]) not in NO_COMMANDS]
    assert not strange, "\n".join(
        [*(f"{b.place}: neither commands nor Python: {b.text.splitlines()[0]}" for b in strange),
         "Write whole commands, add the program to PROGRAMS in tests/helpers/doc_commands.py, or, if it is no command, "
         "its first line to NO_COMMANDS in tests/helpers/doc_sizes.py."]
    )  # fmt: skip


def test_no_entry_is_left_over() -> None:
    """What no page shows any more goes."""
    used = {id(size_of(command)) for command in COMMANDS}
    assert not [run.called for run in RUNS if id(run) not in used]
    named = {reason(command) for command in COMMANDS}
    assert not {*CHECKED, *OWN_TESTS} - named
    assert not NO_COMMANDS - {(b.page, b.text.splitlines()[0]) for b in other_blocks()}


def test_nothing_is_both_run_and_excused() -> None:
    assert not [command.place for command in COMMANDS if size_of(command) and reason(command)]


# What is not run is looked at


@pytest.mark.parametrize("command", MAKE, ids=lambda c: c.place)
def test_make_knows_the_target_and_its_variables(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()
    _, target, *rest = shlex.split(command.called)
    assert re.search(rf"^\.PHONY:.*\b{target}\b", makefile, re.MULTILINE), f"{command.place}: no target {target}"
    for name, _, _ in (word.partition("=") for word in rest):
        assert re.search(rf"^{name}\s*\?=", makefile, re.MULTILINE), f"{command.place}: make has no variable {name}"
    if target != "gpu-check":  # it looks for a GPU with --dry-run too; tests/project/test_makefile.py has one made up
        dry(command)


@pytest.mark.parametrize("command", [c for c in MAKE if c.begins("make bench-peers")], ids=lambda c: c.place)
def test_options_of_the_comparison_with_peers_are_valid(command: Command, monkeypatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr("jaxspec.bench.peers.run", lambda args: asked.append(args) or 0)
    monkeypatch.chdir(tmp_path)
    (started,) = dry(command)
    module, *argv = shlex.split(started.called)
    assert main_of(module)(argv) == 0 and len(asked) == 1


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.begins("pip install")], ids=lambda c: c.place)
def test_pip_is_asked_for_extras_that_exist(command: Command) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {name.strip() for group in re.findall(r"\[(.*?)\]", command.text) for name in group.split(",")}
    assert asked <= extras.keys(), f"{command.place}: no extra {asked - extras.keys()}"


def test_files_of_other_programs_are_there() -> None:
    assert (ROOT / ".pre-commit-config.yaml").exists()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_make_alone_lists_the_targets_that_the_pages_name() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not [c.place for c in MAKE if f"{' '.join(shlex.split(c.called)[:2])} " not in f"{shown} make help "]


# How pages are read

PAGE = """# A page

Run `make lint`, or `python -m
jaxspec.bench offline`; `order: fcfs` and `jaxspec/serve` are no commands.

    python -m jaxspec.bench simulate --set a=1 \\
        --lengths DATA/{x,y}.csv   # with a remark
    curl http://127.0.0.1:8000 -d '{
      "n": 1
    }'

    llm.generate(prompts,
                 slo={"tpot_ms": 3})

* a list

    a  tree, of folders

```python
print("python -m jaxspec.serve")
```

```sh
FLAGS="--a --b" N=1 jaxspec train-predictor --config x.yaml
```
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(doc_commands, "ROOT", tmp_path)
    monkeypatch.setattr(doc_commands, "PAGES", [tmp_path / "page.md"])
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path / "page.md"


def test_commands_are_found_where_they_stand(page: Path) -> None:
    curl = "curl http://127.0.0.1:8000 -d '{\n  \"n\": 1\n}'"
    assert [(c.line, c.called) for c in commands()] == [
        (6, "jaxspec.bench simulate --set a=1 --lengths DATA/x.csv DATA/y.csv"),
        (8, curl),
        (24, "jaxspec.train_predictor --config x.yaml"),
        (3, "make lint"),
        (3, "jaxspec.bench offline"),
    ]
    assert commands()[2].environment == {"FLAGS": "--a --b", "N": "1"}
    assert [(s.line, s.text.split("(")[0]) for s in snippets()] == [(12, "llm.generate"), (20, "print")]
    assert [(b.line, b.text) for b in other_blocks()] == [(17, "a  tree, of folders")]


def test_a_new_command_is_noticed(page: Path) -> None:
    for text in ("make owls", "python -m jaxspec.owls --json x", "jaxspec owls", "git clone URL"):
        (found,) = commands_of(Block("page.md", 1, text)) or []
        assert size_of(found) is None and reason(found) is None
    assert not is_python(Block("page.md", 1, "--engine --repeats 3"))
    assert commands_of(Block("page.md", 1, "podman run owls")) is None
    page.write_text("`jaxspec owls`")
    assert [span.text for span in spans(page)] == ["jaxspec owls"]


def test_a_line_is_one_command() -> None:
    for text in ("make test && make lint", "curl URL | head", "make test > log", "curl $URL"):
        with pytest.raises(ValueError, match=r"page\.md line 7"):
            _ = Command("page.md", 7, text).words
    assert Command("page.md", 7, 'curl -d \'{"a": "x > $y; z"}\' URL').words[2] == '{"a": "x > $y; z"}'
