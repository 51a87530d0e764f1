"""Predicting how many tokens a model will answer a prompt with."""

from __future__ import annotations

from pathlib import Path

#: Predictors that come with the package, one a file.
SHIPPED = Path(__file__).parent / "trained"


def shipped() -> dict[str, Path]:
    """Their files by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.safetensors"))}
