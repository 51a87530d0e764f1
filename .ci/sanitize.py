"""Runs pytest with the CPU kernels compiled for the address and undefined behaviour sanitizers: `sanitize.py ARGS…`.

gcc's runtimes are loaded before everything else. Leaks are not looked for: Python frees little at its end. What a
sanitizer finds is printed and ends the run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

#: The compiler must not inherit the runtimes. -O3 would take minutes to compile.
_COMPILER = (
    "env -u LD_PRELOAD gcc -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
)
#: Ends with an error unless the kernels that are used are those with the sanitizers.
_CHECK = """
from jaxspec.kernels.build import build
used = build().read_bytes()
missing = [name for name in (b"__asan_init", b"__ubsan_handle") if name not in used]
raise SystemExit(f"the kernels were not compiled with the sanitizers: {missing} missing" if missing else 0)
"""


def main(arguments: list[str]) -> int:
    """Returns pytest's exit code."""
    if shutil.which("gcc") is None:
        print("test-sanitize needs gcc with its sanitizers (apt install gcc)", file=sys.stderr)
        return 2
    found = [_runtime(name) for name in ("libasan.so", "libubsan.so")]
    environment = os.environ | {
        "CC": _COMPILER, "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }  # fmt: skip
    for command in (["-c", _CHECK], ["-m", "pytest", "-s", *arguments]):
        if code := subprocess.run([sys.executable, *command], env=environment).returncode:
            return code
    return 0


def _runtime(name: str) -> str:
    return subprocess.run(
        ["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
