"""Length predictors: how many tokens will the model answer a prompt with?"""

from __future__ import annotations

from pathlib import Path

#: Folder of the length predictors that ship with the package, one per file.
SHIPPED = Path(__file__).parent / "trained"


def shipped() -> dict[str, Path]:
    """Files of the shipped predictors, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.safetensors"))}
