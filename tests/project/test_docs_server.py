"""What the pages ask a server, and their Python, on one live server with a tiny model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import doc_data
from helpers.doc_commands import Block, Command, commands, snippets
from helpers.doc_runs import LONGEST, run, sends_load
from helpers.serving import serving
from jaxspec import LLM, SamplingParams

COMMANDS = commands()
#: What the pages write, and what stands for it here.
URL, MODEL = "http://127.0.0.1:8000", 'LLM(model="smollm2-135m")'
SMALL: dict[str, Any] = dict(
    max_model_len=640, max_num_batched_tokens=64, token_buckets=[1, 64], kv_cache_tokens=2560, compilation_cache_dir="",
    served_model_name="smollm2-135m", slo={"categories": {"chat": {"tpot_ms": 60_000}}},
)  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("pages")
    doc_data.write(folder)
    model = str(folder / "path" / "to" / "folder")
    with LLM(model=model, **SMALL) as llm, serving(llm.engine) as url:
        yield SimpleNamespace(folder=folder, model=model, llm=llm, url=url)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.begins("curl")], ids=lambda c: c.place)
def test_curl(command: Command, live: SimpleNamespace) -> None:
    words = [word.replace(URL, live.url) for word in command.arguments]
    assert words != command.arguments, f"{command.place}: it asks another server than {URL}"
    quiet = ["--fail-with-body", "--silent", "--show-error", "--max-time", "60"]
    asked = subprocess.run([*words, *quiet], capture_output=True, text=True, timeout=LONGEST, check=False)
    assert asked.returncode == 0, f"{command.place}: {asked.stdout}{asked.stderr}"
    assert json.loads(asked.stdout)["choices"]


@pytest.mark.parametrize("command", [c for c in COMMANDS if sends_load(c)], ids=lambda c: c.place)
def test_load_is_sent(command: Command, live: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    run(command, live.folder, monkeypatch, live.url)


@pytest.mark.parametrize("snippet", snippets(), ids=lambda s: s.place)
def test_python(snippet: Block, live: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that a piece uses without making them are those of the page: an `LLM`, prompts and their parameters."""
    text = snippet.text.replace(URL, live.url).replace(MODEL, f"LLM(model={live.model!r}, **SMALL)")
    given = {"llm": live.llm, "prompts": ["Owls", "Foxes"], "params": SamplingParams(max_tokens=4), "SMALL": SMALL}
    exec(compile(text, snippet.place, "exec"), given)
    assert "print(" not in text or capsys.readouterr().out.strip(), f"{snippet.place}: nothing was printed"
