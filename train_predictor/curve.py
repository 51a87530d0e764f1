"""A run's learning curve: `curve.json` and, with matplotlib (extra `bench`), `curve.png` in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jaxspec.extras import install_hint


def write(evaluations: Sequence[Any], folder: Path, target: str, plot: Callable[[Sequence[Any], Any], None]) -> None:
    """Write both files; `plot(evaluations, axes)` draws on matplotlib's axes. The title names the target and the run.

    Without matplotlib the picture is skipped, with one message.
    """
    (folder / "curve.json").write_text(json.dumps(list(evaluations), indent=1) + "\n")
    try:
        from matplotlib.figure import Figure  # the optional extra `bench`
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        _say_undrawn()
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    plot(evaluations, axes)
    axes.set(title=f"{target}: {folder.name}", xlim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(folder / "curve.png", dpi=120)


def files(folder: Path) -> list[Path]:
    """Files that a finished run has written."""
    return [path for name in ("curve.json", "curve.png") if (path := folder / name).exists()]


@cache
def _say_undrawn() -> None:
    print(f"curve.png is not drawn: matplotlib is missing; {install_hint('bench')}", flush=True)
