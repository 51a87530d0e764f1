"""The table of compiled programs that is printed after the tests."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest

from helpers.gpu_compiler import Compiled
from jaxspec.step.batch import BatchShape

HEADER = """
| program | card | kernels | of them per layer | kernels in branches | temporaries, MB | input, KiB |
| --- | --- | ---: | ---: | ---: | ---: | ---: |"""
_rows: list[str] = []
#: A program for a card that is missing cannot be loaded from the cache of compiled programs.
jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture
def report() -> Callable[..., None]:
    """Adds a row to the table."""

    def add(name: str, card: str, program: Compiled, shape: BatchShape | None = None) -> None:
        attention = [i for i, kernel in enumerate(program.kernels) if kernel == "tree_attention"]
        each = attention[-1] - attention[-2] if len(attention) > 1 else "–"
        inside = sum(thunk.depth > 1 for thunk in program.thunks)
        size = f"{shape.size * 4 / 1024:.0f}" if shape else "–"
        mb = f"{program.temporary_bytes / 1e6:.0f}"
        _rows.append(f"| {name} | {card} | {len(program.kernels)} | {each} | {inside} | {mb} | {size} |")

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _rows:
        terminalreporter.write_line("\n".join([HEADER, *_rows]))
