"""Compiles grammars of clients in a process of its own first: some take minutes or gigabytes, or crash.

llguidance bounds most of its work, not all. The process gets seconds and memory, and is replaced if it uses them up.
Run as a module, it is that process: it writes a line when it is ready, and for each grammar, a line of JSON, a line of
JSON with the error or null.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
from contextlib import suppress

#: Seconds and bytes for one grammar. Usual ones take milliseconds.
SECONDS, MEMORY = 5.0, 2 * 2**30
#: Bytes of its stack, at most half of that of the server's threads. Compiling is recursive, and an overflow ends the
#: process.
_STACK = 2**20
#: Seconds until a new process answers.
_START = 20.0


class Trial:
    """Thread-safe. The process starts with the first grammar."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds, self._lock = seconds, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def error(self, grammar: str) -> str | None:
        """Why the grammar cannot be used; None: it can. Takes at most the time for one grammar, and once a start."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # it has ended while it waited
            process = self._process = self._process or _start()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.write(json.dumps(grammar).encode() + b"\n")
                process.stdin.flush()
            line = _line(process, self._seconds)
            if line is None:
                self._end()
                return "it takes too much time or memory to compile"
            return json.loads(line)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()


def _start() -> subprocess.Popen[bytes]:
    """A process that is ready. Raises `RuntimeError` if it does not start."""
    command = [sys.executable, "-m", "jaxspec.constraints.trial"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if _line(process, _START) is None:
        process.kill()
        process.communicate()
        raise RuntimeError("the process that tries grammars does not start")
    return process


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """The next line that it writes; None if it ends or takes longer."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        return (process.stdout.readline() or None) if ready.select(seconds) else None


def main() -> None:
    """Entry point of the trial process."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    threading.stack_size(_STACK)
    reader = threading.Thread(target=_answer)
    reader.start()
    reader.join()


def _answer() -> None:
    from llguidance import LLMatcher, LLTokenizer

    from jaxspec.constraints.limits import limits

    tokenizer = LLTokenizer("byte")
    print("null", flush=True)
    for line in sys.stdin.buffer:
        grammar = json.loads(line)
        error = LLMatcher.validate_grammar(grammar, tokenizer, limits=limits())
        if not error:
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
            matcher.compute_bitmask()
            error = matcher.get_error()
        print(json.dumps(error or None), flush=True)


if __name__ == "__main__":
    main()
