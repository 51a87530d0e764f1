"""A run's learning curve: `curve.json` and, with matplotlib (extra `bench`), `curve.png` in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from jaxspec.extras import install_hint


class Evaluation(TypedDict):
    """One evaluation on the held-out rows.

    tokens           tokens trained on so far, counted again in every epoch
    hits             per depth, the share of positions where the drafter's likeliest token is the target's
    accepted_length  mean accepted length of a greedy chain, bonus token included
    """

    tokens: int
    hits: list[float]
    accepted_length: float


def write(evaluations: Sequence[Evaluation], folder: Path, title: str) -> None:
    """Write both files."""
    keep(evaluations, folder, lambda path: draw(evaluations, path, title))


def keep(evaluations: Sequence[Any], folder: Path, draw: Callable[[Path], None]) -> None:
    """Write `curve.json`, and `curve.png` with `draw`. Without matplotlib the latter is skipped, with one message."""
    (folder / "curve.json").write_text(json.dumps(list(evaluations), indent=1) + "\n")
    try:
        draw(folder / "curve.png")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        _say_undrawn()


def draw(evaluations: Sequence[Evaluation], path: Path, title: str) -> None:
    """Plot accepted length against tokens trained on. Raises `ModuleNotFoundError` without matplotlib."""
    from matplotlib.figure import Figure  # the optional extra `bench`

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([e["tokens"] for e in evaluations], [e["accepted_length"] for e in evaluations], marker="o")
    axes.set(xlabel="tokens trained on", ylabel="accepted length, held-out prompts", title=title, xlim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


@cache
def _say_undrawn() -> None:
    print(f"curve.png is not drawn: matplotlib is missing; {install_hint('bench')}", flush=True)
