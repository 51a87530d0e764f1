"""Measure the startup time: wall and CPU seconds from process start until the server or LLM is ready and has generated
its first token.

Each start is a new process. With --cold the first one has an empty cache, so it downloads the model and compiles
everything. The first process runs until everything is compiled and measured, so that later ones find it in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import psutil
from rich.console import Console

from jaxspec.bench import BenchError, options
from jaxspec.bench.report import machine, write_json
from jaxspec.bench.table import each, terminal
from jaxspec.progress import progress

#: Seconds after which a start counts as failed.
_TIMEOUT = 900.0
#: Program of a process that uses `LLM`; its arguments are the preset and the settings as JSON.
_LLM = """
import json, sys
from jaxspec import LLM, SamplingParams
with LLM(config=sys.argv[1] or None, **json.loads(sys.argv[2])) as llm:
    print("ready", flush=True)
    llm.generate("Hello there, my", SamplingParams(temperature=0, max_tokens=1))
    print("token", flush=True)
    if sys.stdin.readline():
        llm.engine.warm_up.wait(900)
        print("warm", flush=True)
        sys.stdin.readline()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    parser.add_argument(
        "--kind",
        choices=("server", "llm"),
        default="server",
        help="start the server or an LLM object (default: %(default)s)",
    )
    options.add_numbers(parser, ("--repeats N", 3, "number of starts"))
    parser.add_argument("--cold", action="store_true", help="use an empty cache for the first start")
    parser.add_argument("--json", metavar="FILE", help="write the times as JSON")


def run(args: argparse.Namespace) -> int:
    """Print and write the times. Raises `BenchError` if a process fails."""
    start_once = _server if args.kind == "server" else _llm
    starts: list[dict[str, Any]] = []
    with ExitStack() as stack, progress("starts", args.repeats) as advance:
        environment = dict(os.environ)
        if args.cold:
            environment["JAXSPEC_CACHE"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxspec-cold-"))
        for i in range(args.repeats):
            starts.append(
                {"cache": "empty" if args.cold and i == 0 else "filled", **start_once(args, environment, i == 0)}
            )
            advance()
    keys = "cache", "ready_s", "ready_cpu_s", "first_token_s", "first_token_cpu_s", "resident_bytes"
    times = each(("ready, s", "CPU, s", "first token, s", "CPU, s"), "{:.1f}")
    size = "resident, GiB", lambda size: f"{size / 2**30:.2f}"
    Console().print(terminal(([start[key] for key in keys] for start in starts), "cache", *times, size))
    if args.json:
        write_json(args.json, {"machine": machine(), "kind": args.kind, "starts": starts})
    return 0


def _server(args: argparse.Namespace, environment: Mapping[str, str], finish_warm_up: bool) -> dict[str, Any]:
    """Start a server and measure. `finish_warm_up`: let it compile and measure everything before it is stopped."""
    with tempfile.TemporaryDirectory() as folder:
        log_path = os.path.join(folder, "log")
        command = [sys.executable, "-m", "jaxspec.serve", "--port", "0"]
        for name, value in (("--config", args.config), ("--model", args.model)):
            command += [name, value] if value else []
        for name, values in (("--draft", args.draft), ("--set", args.set)):
            command += [part for value in values for part in (name, value)]
        with open(log_path, "w+") as log, _Watched(command, environment, log) as process:
            url = process.wait_for("serves ", log).split(" at ", 1)[1].split()[0]
            at_ready = process.used("ready")
            body = {"prompt": "Hello there, my", "max_tokens": 1, "temperature": 0}
            httpx.post(f"{url}/v1/completions", json=body, timeout=_TIMEOUT).raise_for_status()
            measured = at_ready | process.used("first_token")
            while finish_warm_up and not httpx.get(f"{url}/health").json()["programs"]["measured"]:
                time.sleep(0.2)
            return measured


def _llm(args: argparse.Namespace, environment: Mapping[str, str], finish_warm_up: bool) -> dict[str, Any]:
    """Measure the start of an `LLM` in a separate process."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-c", _LLM, args.config or "", json.dumps(options.overrides(args))]
        with _Watched(command, environment, log) as process:
            process.wait_for("ready", log)
            at_ready = process.used("ready")
            process.wait_for("token", log)
            measured = at_ready | process.used("first_token")
            if finish_warm_up:
                process.send("continue")
                process.wait_for("warm", log)
            return measured


class _Watched:
    """A process whose output goes to the file `log`, with its resource usage. Terminated on exit."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Any) -> None:
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True
        )
        self._usage = psutil.Process(self._process.pid)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def wait_for(self, text: str, log: Any) -> str:
        """Wait for the first output line with `text`. Raises `BenchError` if the process ends or takes too long."""
        while time.perf_counter() - self._begun < _TIMEOUT:
            log.seek(0)
            lines = log.read().splitlines()
            if found := next((line for line in lines if text in line), None):
                return found
            if self._process.poll() is not None:
                raise BenchError(f"the process failed: {lines[-1] if lines else self._process.returncode}")
            time.sleep(0.02)
        raise BenchError(f"the process was not ready after {_TIMEOUT:g} s")

    def send(self, line: str) -> None:
        """Write a line to the process's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def used(self, moment: str) -> dict[str, Any]:
        """Wall and CPU seconds since the start, child processes included, under keys that begin with `moment`; and the
        resident memory in bytes."""
        cpu, seconds = self._usage.cpu_times(), time.perf_counter() - self._begun
        total = cpu.user + cpu.system + cpu.children_user + cpu.children_system
        resident = self._usage.memory_info().rss
        return {f"{moment}_s": seconds, f"{moment}_cpu_s": total, "resident_bytes": resident}
