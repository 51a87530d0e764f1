"""Says whether this Python can run `make gpu-check` from the source tree: status 0 if so, else 1 and a line why not."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path

#: What the tests and the benchmark of the check import. Serving needs more.
NEEDED = frozenset({
    "jax", "flax", "numpy", "safetensors", "tokenizers", "jinja2", "pyyaml", "pydantic", "rich", "psutil", "ml_dtypes",
    "jaxtyping", "pytest", "hypothesis", "chex",
})  # fmt: skip


def main() -> int:
    why = "jaxspec needs Python 3.11 or newer" if sys.version_info < (3, 11) else missing() or blind()
    print(f"gpu-check: {sys.executable}: {why or 'JAX sees a GPU and all needed packages are there'}", flush=True)
    return 1 if why else 0


def missing() -> str | None:
    """The packages among `NEEDED` that are not installed, or older than the base and the extra `test` ask for."""
    import tomllib  # not in Python 3.10, which is to hear so from `main`

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    lacking = []
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        name, _, least = requirement.partition(">=")
        if name not in NEEDED:
            continue
        try:
            found = version(name)
        except PackageNotFoundError:
            lacking.append(name)
            continue
        if older(found, least):
            lacking.append(f"{requirement} ({found} is installed)")
    return f"missing: {', '.join(lacking)}" if lacking else None


def older(found: str, least: str) -> bool:
    """Whether a version is below another, by the numbers it begins with."""
    pairs = zip_longest(numbers(found), numbers(least), fillvalue=0)
    return next((a < b for a, b in pairs if a != b), False)


def numbers(text: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", text)
    return [int(part) for part in match[0].split(".")] if match else []


def blind() -> str | None:
    """Why JAX does not see a GPU."""
    try:
        import jax

        backend = jax.default_backend()
    except Exception as error:  # a plugin that does not fit its driver raises what it likes
        return f"JAX does not start: {' '.join(str(error).split())}"
    return None if backend == "gpu" else f"JAX sees no GPU, only the {backend}"


if __name__ == "__main__":
    sys.exit(main())
