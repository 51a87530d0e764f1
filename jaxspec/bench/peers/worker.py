"""An engine in a process of its own, which is asked for a turn at a time."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from typing import Any

import psutil

from jaxspec.bench import BenchError


class Worker:
    """An engine in a process of its own. Its standard error is the user's."""

    def __init__(self, name: str, command: list[str], settings: Mapping[str, Any]):
        self.name = name
        threads = str(settings["threads"])
        # PYTHONSAFEPATH would keep the transformers worker from finding turns.py beside it.
        env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"OMP_NUM_THREADS": threads}
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        except OSError as error:
            raise BenchError(f"cannot start {name}: {error}") from None
        # One engine loads at a time, and none while another is measured.
        try:
            self.ask(settings)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def ask(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Raises `BenchError` if the worker has died."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchError(f"the {self.name} worker died with exit code {self._process.wait()}; see above")
        return json.loads(line)

    def timed(self, content: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        """The answer, and how many cores everything else on the machine kept busy meanwhile. Zero in a fair turn."""
        begin, busy, own = time.monotonic(), _busy_seconds(), self._own_seconds()
        answer = self.ask(content)
        others = (_busy_seconds() - busy) - (self._own_seconds() - own)
        return answer, max(0.0, others / (time.monotonic() - begin))

    def _own_seconds(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """The end of its input is the worker's sign to leave."""
        assert self._process.stdin
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def _busy_seconds() -> float:
    """Processor time of the whole machine so far."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)
