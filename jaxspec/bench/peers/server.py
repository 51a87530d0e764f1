"""Runs a server in a separate process: start, stop for a while, memory, end."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import httpx
import psutil

from jaxspec.bench import BenchError
from jaxspec.bench.disturbance import resident_bytes, tree

#: Seconds that a server may take to load its model and compile.
START_TIMEOUT = 900.0
#: Seconds between SIGTERM and SIGKILL.
END_TIMEOUT = 15.0
#: Seconds that stopped processes may take to stand still: a starved machine delivers signals late.
STOP_TIMEOUT = 10.0
#: An exception as Python prints it, perhaps after the logger's prefix in brackets.
EXCEPTION = re.compile(r"(?:^|\] |\) )([\w.]*(?:Error|Exception): .*)")


class Server:
    """A server process, pinned to the first `threads` cores. As a context manager it ends the process.

    `command` has "{port}" where the port belongs. The server is ready when /health answers 200.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], threads: int) -> None:
        """Start the process and wait until it is ready. Raises `BenchError` with the reason."""
        self.name = name
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.command = [part.replace("{port}", str(port)) for part in command]
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by `end`)
        begin = time.monotonic()
        try:
            with _pinned(threads):
                # A session of its own: Ctrl-C reaches this process alone, which then ends the servers.
                self._process = subprocess.Popen(
                    self.command, env={**os.environ, "OMP_NUM_THREADS": str(threads), **env},
                    stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise BenchError(f"cannot start: {error}") from None
        try:
            self._wait(begin + START_TIMEOUT)
        except BaseException:
            self.end()
            raise
        self.ready_s = time.monotonic() - begin

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise BenchError(f"ended with exit code {code}: {self.reason()}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.1)
        raise BenchError(f"was not ready after {START_TIMEOUT:g} s: {self.reason()}")

    def reason(self) -> str:
        """The first exception that the server's output names, or its last line."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()] or ["no output"]
        return next((found[1] for line in lines if (found := EXCEPTION.search(line))), lines[-1])

    def resident_bytes(self) -> int:
        return resident_bytes(self.pid)

    def suspend(self) -> None:
        """Stop all its processes, so that threads that wait actively do not disturb others.

        Returns when they stand still: the system stops a process some time after it was told to.
        """
        processes = list(tree(self.pid))
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        deadline = time.monotonic() + STOP_TIMEOUT
        while any(map(_runs, processes)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def resume(self) -> None:
        for process in tree(self.pid):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def end(self) -> None:
        """End all its processes."""
        self.resume()
        processes = list(tree(self.pid))
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def cores(threads: int) -> list[int]:
    """The first `threads` cores that this process may use; all of 0 … threads - 1 where that cannot be read."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(threads)
    return list(available)[:threads]


@contextmanager
def _pinned(threads: int) -> Iterator[None]:
    """Processes that are started meanwhile run on the first `threads` cores (Linux only)."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores(threads))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
