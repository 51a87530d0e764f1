"""The losses of a run: `curve.json` and, with matplotlib (the extra `bench`), `curve.png` in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from jaxspec.distill.curve import keep


class Evaluation(TypedDict):
    """step: of both phases together; phase: 1 (all weights) or 2 (head only); train: mean loss of the steps since the
    evaluation before (None: no step was made); validation: loss of the validation part; mae in tokens and Kendall's τ
    there (None: no number)."""

    step: int
    phase: int
    train: float | None
    validation: float
    mae: float | None
    tau: float | None


def write(evaluations: Sequence[Evaluation], folder: Path, title: str) -> None:
    """Both files, anew; without matplotlib the picture is left out."""
    keep(evaluations, folder, lambda path: draw(evaluations, path, title))


def draw(evaluations: Sequence[Evaluation], path: Path, title: str) -> None:
    """Losses against steps, a line where the second phase begins. Raises `ModuleNotFoundError` without matplotlib."""
    from matplotlib.figure import Figure  # the optional extra `bench`

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    known = [(e["step"], e["train"]) for e in evaluations if e["train"] is not None]
    axes.plot([s for s, _ in known], [loss for _, loss in known], marker=".", label="training")
    axes.plot([e["step"] for e in evaluations], [e["validation"] for e in evaluations], marker="o", label="validation")
    if second := [e["step"] for e in evaluations if e["phase"] == 2]:
        axes.axvline(second[0], color="grey", linestyle="--", label="from here on the head only")
    axes.set(xlabel="steps", ylabel="loss", title=title, xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
