"""Measure the engine on an NVIDIA GPU: is it right, and how far from the roofline?

Needs neither network nor files: models have the sizes of known ones and random weights. Every result is written at
once, into OUT/gpu.json and the tables of OUT/gpu.md. A later run of the same code goes on with what is missing;
results of earlier code are replaced.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxspec.bench import BenchError, options
from jaxspec.bench.gpu.plan import MODEL_NAMES, REAL, TINY, Cell, cells
from jaxspec.errors import explained
from jaxspec.progress import progress

if TYPE_CHECKING:
    from jaxspec.bench.gpu.card import Card
    from jaxspec.bench.gpu.store import Store

#: Minutes after which no cell is started, without `--full`.
MINUTES = 8.0
_LONGEST_MESSAGE = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="sizes of the model (default: %(default)s)"
    )
    parser.add_argument("--full", action="store_true", help="go on with all cells after those of the core")
    parser.add_argument(
        "--minutes", type=options.positive, metavar="N",
        help=f"start no cell that would not end within N minutes (default: {MINUTES:g}; with --full: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--cells", nargs="+", metavar="NAME", help="only cells whose names begin like this, such as kernel or 'step 16'"
    )
    parser.add_argument("--again", action="store_true", help="measure again what was measured with the same code")
    parser.add_argument(
        "--interpret", action="store_true",
        help="run the attention kernel in an interpreter on the CPU: checks the benchmark itself, times mean nothing",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="DIR", help="output folder (default: docs/results; with --interpret: build/gpu)"
    )
    parser.add_argument("--json", metavar="FILE", help="write a copy of all numbers to this file")


def run(args: argparse.Namespace) -> int:
    """Measure cell by cell. Returns 1 if one failed. Raises `BenchError` if there is no GPU or no earlier results can
    be read."""
    budget = Budget(args.minutes or (None if args.full else MINUTES))
    card = _card(args)
    from jaxspec.bench.gpu.card import setting
    from jaxspec.bench.gpu.store import Store

    store = Store(
        Path(args.out or ("build/gpu" if args.interpret else "docs/results")), args.model, setting(), args.json
    )
    chosen = choose(cells(card.sizes, card.config.num_layers), args.full, args.cells)
    # Cells that failed, or ended the last run, come after the others: they might end this one too.
    due = sorted((cell for cell in chosen if args.again or not store.has(cell)), key=store.failed)
    store.publish()
    left = measure(card, due, store, budget)
    console = Console(soft_wrap=True)
    there, done = len(chosen) - len(due), len(due) - len(left)
    console.print(f"{done} cells measured, {there} were there: {store.page}", markup=False)
    if left:
        console.print(f"Left for lack of time: {', '.join(cell.key for cell in left)}", markup=False)
    console.print(store.verdict, markup=False)
    return 1 if any("error" in store.cells[cell.key] for cell in chosen if cell.key in store.cells) else 0


def measure(card: Card, due: Sequence[Cell], store: Store, budget: Budget) -> list[Cell]:
    """Measure these cells and store each at once. Returns those that there was no time for.

    A cell that fails is stored with its error, and the next one begins.
    """
    from jaxspec.bench.gpu.card import Skipped
    from jaxspec.bench.gpu.measures import MEASURES
    from jaxspec.bench.gpu.report import summary

    left: list[Cell] = []
    with progress("cells", len(due)) as advance:
        for cell in due:
            if not budget.allows(cell):
                left.append(cell)
                continue
            store.begin(cell)
            begun = time.monotonic()
            try:
                numbers = MEASURES[cell.kind](card, **cell.arguments)
            except Skipped as reason:
                numbers = {"skipped": str(reason)}
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                numbers = {"error": f"{type(error).__name__}: {explained(error)}"[:_LONGEST_MESSAGE]}
            seconds = time.monotonic() - begun
            budget.took(cell, seconds)
            store.add(cell, numbers, seconds)
            print(f"{cell.key}: {summary(numbers)} ({seconds:.0f} s)", flush=True)
            card.release()
            advance()
    return left


def _card(args: argparse.Namespace) -> Card:
    import jax

    backend = jax.default_backend()
    if args.interpret and backend != "cpu":
        raise BenchError(f"--interpret is for the CPU, JAX uses the {backend}; set JAX_PLATFORMS=cpu")
    if not args.interpret and backend != "gpu":
        raise BenchError(f"JAX sees no GPU, only the {backend}; --interpret checks the benchmark itself on the CPU")
    from jaxspec.bench.gpu.card import Card

    return Card(args.model, TINY if args.model == "tiny" else REAL, args.interpret)


def choose(every: Sequence[Cell], full: bool, names: Sequence[str] | None) -> list[Cell]:
    """The cells to measure. Names choose among all cells. Raises `BenchError` for a name that no cell has."""
    if not names:
        return [cell for cell in every if full or cell.core]
    for name in names:
        if not any(cell.key.startswith(name) for cell in every):
            kinds = ", ".join(dict.fromkeys(cell.kind for cell in every))
            raise BenchError(f"--cells: no cell begins with {name!r}; kinds of cells: {kinds}")
    return [cell for cell in every if any(cell.key.startswith(name) for name in names)]


class Budget:
    """Whether there is time for another cell. Begins when it is created; `minutes` None: there always is."""

    def __init__(self, minutes: float | None, clock: Any = time.monotonic) -> None:
        self._seconds, self._clock, self._begun = minutes and 60 * minutes, clock, clock()
        self._last: dict[str, float] = {}

    def allows(self, cell: Cell) -> bool:
        """Whether `cell` would end in time, if it takes as long as the last of its kind did."""
        if self._seconds is None:
            return True
        return self._clock() - self._begun + self._last.get(cell.kind, cell.guess) <= self._seconds

    def took(self, cell: Cell, seconds: float) -> None:
        self._last[cell.kind] = seconds
