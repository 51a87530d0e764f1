"""The model's weights in the formats that peers read. Converted once, and kept in the cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from jaxspec.bench import BenchError
from jaxspec.paths import cache_folder


def float32_gguf(gguf: Path, quantize: Path) -> Path:
    """Convert a GGUF file to float32 with llama.cpp's `llama-quantize`. -> the new file. Raises `BenchError`."""
    command = [str(quantize), "--allow-requantize", str(gguf)]
    return _kept(gguf, "-f32.gguf", lambda target: _run([*command, str(target), "F32"]))


def hf_folder(gguf: Path, python: Path, dtype: str) -> Path:
    """Convert a GGUF file to a Hugging Face folder in float32 or bfloat16. -> the folder. Raises `BenchError`."""
    command = [str(python), str(Path(__file__).with_name("export_hf.py")), str(gguf)]
    return _kept(gguf, f"-hf-{dtype}", lambda target: _run([*command, str(target), dtype]))


def _kept(gguf: Path, ending: str, make: Callable[[Path], None]) -> Path:
    """The converted file or folder: made under another name first, so that what has its name is complete."""
    state = gguf.stat()
    path = cache_folder("peers") / f"{gguf.stem}-{state.st_size:x}-{state.st_mtime_ns:x}{ending}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{os.getpid()}-{path.name}")
        try:
            make(unfinished)
            unfinished.rename(path)
        finally:
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            unfinished.unlink(missing_ok=True)
    return path


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        raise BenchError(f"cannot run {command[0]}: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise BenchError(f"{Path(command[0]).name} failed: {said[-1]}")
