"""Runs an engine in a separate process and measures one turn at a time."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

from jaxspec.bench import BenchError


class Worker:
    """An engine in a separate process, which shares this process's standard error."""

    def __init__(self, name: str, command: list[str], settings: Mapping[str, Any]):
        """Start the process and wait until its engine is loaded. Raises `BenchError`."""
        self.name = name
        threads = str(settings["threads"])
        # With PYTHONSAFEPATH the transformers worker would not find turns.py in its own folder.
        env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"OMP_NUM_THREADS": threads}
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        except OSError as error:
            raise BenchError(f"cannot start {name}: {error}") from None
        # Wait, so that engines load one after another and never during a measurement.
        try:
            self.ask(settings)
        except BaseException:
            self._process.kill()
            self._end()
            raise

    def ask(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Send a JSON object and return the reply. Raises `BenchError` if the worker has died."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchError(f"the {self.name} worker died with exit code {self._process.wait()}; see its output above")
        return json.loads(line)

    def timed(self, content: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        """The reply, and the mean number of cores that other processes kept busy meanwhile; 0 if undisturbed."""
        begin, machine_before, worker_before = time.monotonic(), _machine_seconds(), self._worker_seconds()
        reply = self.ask(content)
        others = (_machine_seconds() - machine_before) - (self._worker_seconds() - worker_before)
        return reply, max(0.0, others / (time.monotonic() - begin))

    def _worker_seconds(self) -> float:
        """CPU time of the worker so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the worker by closing its standard input; kill it after 10 s."""
        assert self._process.stdin
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
        self._end()

    def _end(self) -> None:
        """Wait for the killed or closed process, and close its pipes."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _machine_seconds() -> float:
    """CPU time of all processes of the machine so far."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)
