"""The cells: what is measured, in which order, and at which sizes. Does not import JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

#: The largest step, in tokens.
_MAX_TOKENS = 2048
#: The models of `models.MODELS`.
MODEL_NAMES = "llama-3.1-8b", "smollm2-135m", "tiny"
DTYPES = "float32", "bfloat16"
#: The path whose choices the others are compared with, and other ways to decode along the kernel's paths.
REFERENCE, DRAFTS, BATCH = "XLA, float32", "with draft trees", "in a batch"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the measurements. Contexts are in positions and include the step's own nodes."""

    batches: tuple[int, ...]
    nodes: tuple[int, ...]
    contexts: tuple[int, ...]
    #: Steps of the core, the most telling first: (batch, nodes, context).
    core: tuple[tuple[int, int, int], ...]
    #: Tokens of the prompt that is computed in one step.
    prompt: int
    #: Prompt lengths of the decoded requests, and the tokens that each decodes.
    prompts: tuple[int, ...]
    answer: int
    #: Bytes copied, and the width of the square matrices multiplied, for the device's rates.
    copied: int
    width: int
    #: Runs in a row between two looks at the clock, and how many times.
    chain: int = 20
    repeats: int = 7
    #: Requests of the engine's runs, their prompt length and their answers' length.
    engine: tuple[int, int, int] = (16, 256, 128)


REAL = Sizes(
    batches=(1, 16, 64), nodes=(1, 8, 64), contexts=(512, 2048, 8192),
    core=((16, 1, 2048), (1, 1, 2048), (16, 8, 2048), (64, 1, 2048), (1, 8, 2048)),
    prompt=2048, prompts=(17, 40, 96, 150, 300, 520, 700, 900), answer=48, copied=4 << 30, width=8192,
)  # fmt: skip
TINY = Sizes(
    batches=(1, 2), nodes=(1, 4), contexts=(64,), core=((2, 1, 64), (2, 4, 64)), prompt=32, prompts=(5, 20), answer=4,
    copied=1 << 16, width=64, chain=2, repeats=2, engine=(2, 8, 8),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: a function of `measure.MEASURES` and its arguments."""

    kind: str
    name: str
    core: bool
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Seconds that it takes, compiling included, until one of its kind was measured. A guess.
    guess: float = 30.0

    @property
    def key(self) -> str:
        return f"{self.kind} {self.name}"


#: Attention alone: (nodes, committed) of each tree, heads, key-value heads, head_dim, page size, rows of a tile, and
#: the rest by name: a window, chains of known tokens, an INT8 pool, or nodes of earlier draft levels.
KERNELS: dict[str, dict[str, Any]] = {
    "8B's heads": dict(trees=((8, 2040), (1, 600), (20, 33), (5, 0)), heads=32, kv=8, dim=128, page=32, rows=16),
    "SmolLM2's heads": dict(trees=((9, 33), (4, 1100)), heads=9, kv=3, dim=64, page=32, rows=32),
    "prompts": dict(trees=((300, 640), (70, 0)), heads=32, kv=8, dim=128, page=32, rows=64, chains=True),
    "INT8": dict(trees=((5, 700), (2, 40)), heads=8, kv=2, dim=64, page=32, rows=16, int8=True),
    "earlier levels": dict(trees=((4, 600), (4, 5)), heads=8, kv=2, dim=64, page=16, rows=16, slots=40),
    "window": dict(trees=((6, 700), (12, 90)), heads=4, kv=2, dim=64, page=16, rows=16, window=50),
    "one head a group": dict(trees=((3, 40), (1, 0)), heads=2, kv=2, dim=64, page=16, rows=16),
    "one key-value head": dict(trees=((1, 1), (20, 200), (3, 5000)), heads=8, kv=1, dim=32, page=64, rows=64),
    "window, prompts": dict(trees=((80, 33),), heads=4, kv=2, dim=64, page=16, rows=16, window=20, chains=True),
}
#: Of these, those of the core.
_CORE_KERNELS = 4
#: Rows of an attention tile that are compared. None: those that a step of this size takes.
ROWS = None, 16, 32, 64


def cells(sizes: Sizes, layers: int) -> list[Cell]:
    """All cells, the most valuable first; those of the core come before the others. `layers` of the model."""
    found = [
        *(Cell("rate", what, True, {"what": what}, guess=5) for what in ("copy", "matmul")),
        *_kernels(), *_steps(sizes),
        Cell("agreement", "greedy decoding", True, guess=90),
        Cell("prefill", str(sizes.prompt), True, {"tokens": sizes.prompt}, guess=25),
        *_attention(sizes), *_engine(layers),
    ]  # fmt: skip
    core = sorted((cell for cell in found if cell.core), key=lambda cell: _rank(cell, sizes))
    return [*core, *(cell for cell in found if not cell.core)]


def _rank(cell: Cell, sizes: Sizes) -> int:
    """The place of a core cell: rates, is the kernel right, two steps, are the tokens right, the other steps."""
    if cell.kind != "step":
        return {"rate": 0, "kernel": 1, "agreement": 3, "attention": 6, "prefill": 7}[cell.kind]
    if not cell.arguments["graph"]:
        return 5
    place = cell.arguments["batch"], cell.arguments["nodes"], cell.arguments["context"]
    return 2 if place in sizes.core[:2] else 4


def _kernels() -> Iterator[Cell]:
    for number, name in enumerate(KERNELS):
        for dtype in DTYPES:
            yield Cell("kernel", f"{name}, {dtype}", number < _CORE_KERNELS, {"case": name, "dtype": dtype}, guess=12)


def _steps(sizes: Sizes) -> Iterator[Cell]:
    grid = [(b, n, c) for c in sizes.contexts for b in sizes.batches for n in sizes.nodes]
    ordered = [*sizes.core, *(place for place in grid if place not in sizes.core)]
    for place in ordered:
        batch, nodes, context = place
        if batch * nodes > _MAX_TOKENS:
            continue
        for graph in (True, False):
            # Of the core's steps one is measured without the CUDA graph.
            core = place in sizes.core if graph else place == sizes.core[0]
            arguments = {"batch": batch, "nodes": nodes, "context": context, "graph": graph}
            name = f"{batch} × {nodes} × {context}" + ("" if graph else ", no graph")
            yield Cell("step", name, core, arguments, guess=15)


def _attention(sizes: Sizes) -> Iterator[Cell]:
    for place in sizes.core:
        batch, nodes, context = place
        for rows in ROWS:
            arguments = {"batch": batch, "nodes": nodes, "context": context, "rows": rows}
            name = f"{batch} × {nodes} × {context}" + (f", rows {rows}" if rows else "")
            yield Cell("attention", name, rows is None and batch > 1, arguments, guess=6)


def _engine(layers: int) -> Iterator[Cell]:
    for draft in ("none", "ngram", f"truncated:{max(1, layers // 8)}"):
        yield Cell("engine", draft, False, {"draft": draft}, guess=60)
