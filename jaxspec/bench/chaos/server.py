"""A server process for the fault harness, with limits of its files and memory, as on a full disk or a small host."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any

import httpx
import psutil

from jaxspec.bench.chaos.scenario import CONTEXT, PAGE
from jaxspec.bench.peers.server import free_port

#: Seconds for a start, for the end after SIGTERM, and until a process that lacks memory has ended.
START, STOP, ENDS = 240.0, 60.0, 10.0
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8, "max_model_len": CONTEXT, "page_size": PAGE, "kv_cache_tokens": 12 * PAGE, "predictor": "none",
    "draft": ["suffix", "truncated:1"], "max_num_batched_tokens": 24, "token_buckets": [1, 8], "order": "las",
}  # fmt: skip
#: Sets a limit, and becomes the program that follows.
_LIMITED = "import os, resource, sys; kind, most = map(int, sys.argv[1:3]); resource.setrlimit(kind, (most, most)); "
_LIMITED += "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])"


@dataclass(frozen=True)
class Limit:
    """A limit of a process in bytes: of each file that it writes, or of its data in memory."""

    kind: int
    most: int

    @classmethod
    def files(cls, most: int) -> Limit:
        """Files end there, with an `OSError` as on a full disk."""
        return cls(resource.RLIMIT_FSIZE, most)

    @classmethod
    def memory(cls, most: int) -> Limit:
        return cls(resource.RLIMIT_DATA, most)


class Server:
    """One server process on a port of its own; all share a cache folder. Logs are in `folder`, one for each start."""

    def __init__(self, model: Path, cache: Path, folder: Path, number: int) -> None:
        self._model, self._cache, self._folder, self._number = model, cache, folder, number
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._copying: Thread | None = None
        #: Whether requests may fail: it is being stopped, or is down.
        self.failing = True
        #: How often it was killed or stopped, so that an answer knows whether that happened meanwhile.
        self.ends = 0
        #: Whether its memory is limited: then it may end by itself, and requests may fail.
        self.short = False
        #: The logs of starts with enough memory.
        self.logs: list[Path] = []
        self._starts = 0

    def start(self, limit: Limit | None = None) -> None:
        settings = {**SETTINGS, "suffix_path": self._folder / f"answers{self._number}.safetensors"}
        options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        environment = {**os.environ, "JAXSPEC_CACHE": str(self._cache), "JAX_PLATFORMS": "cpu", "JAXSPEC_THREADS": "1"}
        environment["PYTHONFAULTHANDLER"] = "1"  # where a library ended the process
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = ["-m", "jaxspec.serve", "--model", str(self._model), "--port", str(self.port)]
        if limit is not None:
            command = ["-c", _LIMITED, str(limit.kind), str(limit.most), *command]
        self._process = subprocess.Popen(
            [sys.executable, *command, "--served-model-name", "tiny", *options], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._starts += 1
        self._log = self._folder / f"server{self._number}.{self._starts}.log"
        self.short = False
        self._limited(limit)
        if not self.short:
            self.logs.append(self._log)
        # Not to the file itself: a limit of files would be one of the log.
        self._copying = Thread(target=_copy, args=(self._process.stdout, self._log), daemon=True)
        self._copying.start()

    def limit(self, limit: Limit) -> None:
        """Limit the running process. Does nothing if it has ended."""
        assert self._process is not None
        self._limited(limit)
        with suppress(ProcessLookupError):
            resource.prlimit(self._process.pid, limit.kind, (limit.most, limit.most))

    def _limited(self, limit: Limit | None) -> None:
        """Note whether memory is short: then the log may have anything."""
        if limit is not None and limit.kind == resource.RLIMIT_DATA:
            self.short = True
            if self.logs and self.logs[-1] == self._log:
                self.logs.pop()

    @property
    def data(self) -> int:
        """Bytes of its data, as `Limit.memory` counts them. 0 if it has ended."""
        assert self._process is not None
        try:
            return psutil.Process(self._process.pid).memory_info().data
        except psutil.Error:
            return 0

    @property
    def status(self) -> int | None:
        """The exit status, negative after a signal; None if it runs."""
        assert self._process is not None
        return self._process.poll()

    @property
    def ended(self) -> bool:
        """Whether the process has ended, or was never started."""
        return self._process is None or self.status is not None

    async def ready(self, http: httpx.AsyncClient) -> None:
        """Wait until it is healthy. Raises `TimeoutError`, or `RuntimeError` if it has ended."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            if self.ended:
                raise RuntimeError("a server did not start")
            with suppress(httpx.HTTPError):
                if (await http.get(f"{self.url}/health")).status_code == 200:
                    self.failing = False
                    return
            await asyncio.sleep(0.2)
        raise TimeoutError(f"the server was not healthy after {START:.0f} s")

    async def end(self, how: signal.Signals) -> int:
        """Send the signal. -> the exit status. Raises `TimeoutError`."""
        assert self._process is not None
        self.failing, self.ends = True, self.ends + 1
        self._process.send_signal(how)
        deadline = time.monotonic() + STOP
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server did not end within {STOP:.0f} s after {how.name}")
            await asyncio.sleep(0.05)
        if self._copying is not None:
            self._copying.join(ENDS)
        return self._process.returncode

    @property
    def state(self) -> str:
        """Whether it runs, or its exit status, with the end of its log."""
        return "runs" if self.status is None else f"has ended with {self.status}: {self.log[-1500:]}"

    @property
    def log(self) -> str:
        """The log of the last start; all of it if the process has ended."""
        if self.ended and self._copying is not None:
            self._copying.join(ENDS)
        return self._log.read_text(errors="replace")

    async def lost(self, ends: int) -> bool:
        """Whether a request may have failed that was sent when `ends` had this value: because of a signal or of a limit
        of memory. Notices whether that has ended the process."""
        deadline = time.monotonic() + ENDS
        while self.short and not self.ended and time.monotonic() < deadline and not self.failing:
            await asyncio.sleep(0.05)
        self.failing = self.failing or (self.short and self.ended)
        return self.ends != ends or self.failing or self.short

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _copy(source: IO[bytes] | None, target: Path) -> None:
    assert source is not None
    with source, target.open("wb", buffering=0) as log:
        for line in source:
            log.write(line)


def forget_programs(cache: Path) -> None:
    """Remove compiled programs and profiles from a cache folder, so that the next start has to write them."""
    for kind in ("compiled", "profiles"):
        shutil.rmtree(cache / kind, ignore_errors=True)
