"""Gives mutated files to the loaders, in a process of its own that may crash."""

from __future__ import annotations

import json
import selectors
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxspec.bench import BenchError
from jaxspec.bench.fuzz import corpus
from jaxspec.bench.fuzz.files import make

#: Seconds until the process has imported what it needs.
_START = 120.0


class Loader:
    """The process. It is replaced when it ends or takes too long."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._process: subprocess.Popen[bytes] | None = None

    def flaw(self, kind: str, path: Path) -> str | None:
        """What is wrong with how the file is loaded; None: nothing."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps([kind, str(path)]).encode() + b"\n")
        process.stdin.flush()
        if (line := _line(process, self._seconds)) is not None:
            return json.loads(line)
        code = process.poll()
        self.close()
        return f"not loaded within {self._seconds:g} s" if code is None else f"the process ended with {code}"

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "jaxspec.bench.fuzz.loading", str(self._folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if _line(process, _START) is None:
            process.kill()
            process.communicate()
            raise BenchError("the process that loads files does not start")
        return process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    assert process.stdout is not None
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        return (process.stdout.readline() or None) if ready.select(seconds) else None


def sweep(
    scratch: Path, seed: int, first: int, count: int, seconds: float, told: Callable[[int, str], Any]
) -> dict[str, Any]:
    """Load files `first` … of a seed, made in `scratch`. -> an entry of `docs/results/reliability.json`.

    told: called with the number of each file that fails, and what failed.
    """
    corpus.write(scratch / "corpus")
    loader, into, kinds = Loader(scratch / "corpus" / "hf", seconds), scratch / "mutated", Counter[str]()
    failures: list[dict[str, Any]] = []
    try:
        for index in range(first, first + count):
            shutil.rmtree(into, ignore_errors=True)
            into.mkdir()
            kind, path, change = make(seed, index, scratch / "corpus", into)
            kinds[kind] += 1
            if found := loader.flaw(kind, path):
                failures.append({"index": index, "what": f"{kind}, {change}: {found}"})
                told(index, failures[-1]["what"])
    finally:
        loader.close()
    return {"seed": seed, "first": first, "count": count, "kinds": dict(sorted(kinds.items())), "failures": failures}
