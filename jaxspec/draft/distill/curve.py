"""The learning curve of a run: `curve.json` and, with matplotlib (the extra `bench`), `curve.png` in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from jaxspec.extras import install_hint


class Evaluation(TypedDict):
    """What one look at the held-out rows found.

    tokens: tokens trained on so far, those of a second epoch counted again; hits: at each depth, the share of
    positions where the drafter's first choice is the target's; accepted_length: tokens that a step of a greedy chain
    would yield, the target's own one included.
    """

    tokens: int
    hits: list[float]
    accepted_length: float


def write(evaluations: Sequence[Evaluation], folder: Path, title: str) -> None:
    """Both files, anew."""
    keep(evaluations, folder, lambda path: draw(evaluations, path, title))


def keep(evaluations: Sequence[Any], folder: Path, draw: Callable[[Path], None]) -> None:
    """`curve.json`, and `curve.png` as `draw` makes it; without matplotlib it is left out, which is said once."""
    (folder / "curve.json").write_text(json.dumps(list(evaluations), indent=1) + "\n")
    try:
        draw(folder / "curve.png")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        _say_undrawn()


def draw(evaluations: Sequence[Evaluation], path: Path, title: str) -> None:
    """Accepted length against tokens trained on. Raises `ModuleNotFoundError` without matplotlib."""
    from matplotlib.figure import Figure  # the optional extra `bench`

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([e["tokens"] for e in evaluations], [e["accepted_length"] for e in evaluations], marker="o")
    axes.set(xlabel="tokens trained on", ylabel="accepted length, held-out prompts", title=title, xlim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


@cache
def _say_undrawn() -> None:
    print(f"curve.png is not drawn, as matplotlib is missing: {install_hint('bench')}", flush=True)
