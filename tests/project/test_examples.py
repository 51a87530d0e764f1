"""The examples run as they say, on tiny random models, and print what a reader expects."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import checkpoints
from helpers.doc_commands import Command, commands
from helpers.paths import CONFIGS, ROOT
from helpers.patience import PATIENCE

EXAMPLES = ROOT / "examples"
#: What makes an engine small: few programs to compile, and nothing kept.
SMALL = (
    " --set max_model_len=160 --set max_num_seqs=2 --set max_num_batched_tokens=16 --set token_buckets=[16]"
    " --set kv_cache_tokens=640 --set draft_depth=2 --set compilation_cache_dir="
)
#: Options appended to those of the documented commands.
SIZES = {
    "offline": " --model path/to/folder" + SMALL,
    "serve": " --model path/to/folder" + SMALL,
    "simulate": " --num-requests 40",
    "own_model": " --layers 1" + SMALL,
}


def example(name: str) -> Any:
    """The module of an example. It is on no path."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented(name: str) -> list[Any]:
    """The commands of the pages and docstrings that run this example, each different one once."""
    own = {c.called: c for c in commands() if c.begins(f"python examples/{name}.py")}
    assert own
    return [pytest.param(command, id=command.place) for command in own.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "configs").symlink_to(CONFIGS)
    config = checkpoints.config(hidden_size=32, intermediate_size=32)
    checkpoints.write_hf(folder / "path" / "to" / "folder", config, [checkpoints.hf_tensors(config)])
    checkpoints.write_gguf(folder / "model.gguf", config, checkpoints.gguf_tensors(config))
    return folder


@pytest.fixture
def printed(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs a command at a small size; -> what it prints."""

    def run(command: Command) -> str:
        script, *argv = shlex.split(command.called)[1:]
        monkeypatch.chdir(folder)
        example(Path(script).stem).main([*argv, *SIZES[Path(script).stem].split()])
        return capfd.readouterr().out

    return run


@pytest.mark.slow
@pytest.mark.parametrize("command", documented("offline"))
def test_offline(command: Command, printed: Any) -> None:
    lines = printed(command).splitlines()
    assert len([line for line in lines if " -> " in line]) == 4
    waits = [float(seconds) for line in lines for seconds in re.findall(r"of which ([\d.]+) s in the queue", line)]
    assert len(waits) == 4 and max(waits) > 0
    assert len([line for line in lines if "mean accepted length" in line]) == 4
    assert re.fullmatch(r"\d+ tokens, [\d.]+ tokens/s", lines[-1])


@pytest.mark.slow
@pytest.mark.parametrize("command", documented("serve"))
def test_serve(command: Command, printed: Any) -> None:
    shown = printed(command)
    text, _, metrics = shown.partition("\n\n")
    assert "jaxspec serves folder at http://127.0.0.1:" in text
    assert re.match(r"\d+ tokens\n", metrics)
    assert "speculative_decoding: {" in metrics and "predicted_tokens: None" in metrics
    assert "'tpot_attained': " in metrics and "'ttft_attained': " in metrics


def test_a_server_that_does_not_start_ends_the_example(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        example("serve").main(["--max-num-seqs", "0"])
    assert ended.value.code == 2
    assert "max_num_seqs" in capfd.readouterr().err


@pytest.mark.parametrize("command", documented("simulate"))
def test_simulate(command: Command, printed: Any) -> None:
    header, *rows = printed(command).splitlines()
    assert header.split()[:4] == ["preset", "mean", "p99", "attainment"]
    assert len(rows) >= 2
    for row in rows:
        assert re.fullmatch(r"\w+ +[\d.]+ s +[\d.]+ s +[\d.]+%", row)


def test_the_simulation_needs_no_jax() -> None:
    path = str(EXAMPLES / "simulate.py")
    script = f"""
import runpy, sys
sys.argv = [{path!r}, "--num-requests", "5", {str(CONFIGS / "stta.yaml")!r}]
runpy.run_path({path!r}, run_name="__main__")
assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.splitlines()[1].startswith("stta ")


@pytest.mark.slow
@pytest.mark.parametrize("command", documented("own_model"))
def test_own_model(command: Command, printed: Any) -> None:
    shown = printed(command)
    found = re.findall(r"^(.+?) +([\d.]+) tokens/s, mean accepted length [\d.]+$", shown, re.MULTILINE)
    assert [drafters for drafters, _ in found] == ["no drafts", "ngram", "ngram + truncated:1"]
    assert "with and without drafts: True" in shown
    model = shlex.split(command.called)[2]
    advised = {"no drafts": "none", "ngram": "ngram", "ngram + truncated:1": "ngram --draft truncated:1"}
    best = max(float(speed) for _, speed in found)
    fastest = [drafters for drafters, speed in found if float(speed) == best]  # rounded, so perhaps several
    assert any(f"python -m jaxspec.serve --model {model} --draft {advised[name]}\n" in shown for name in fastest)


def test_every_example_is_listed_short_and_tested() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    scripts = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert listed == scripts.keys() == {f"{name}.py" for name in SIZES}
    assert max(scripts.values()) <= 75
