"""Length predictors: how many tokens will the model answer a prompt with?"""

from __future__ import annotations

from pathlib import Path

#: Folders of the length predictors and length probes that ship with the package, one per file.
SHIPPED, PROBES = (Path(__file__).parent / folder for folder in ("trained", "probes"))


def shipped(folder: Path | None = None) -> dict[str, Path]:
    """Files of the shipped predictors, or of another such folder, by name."""
    return {path.stem: path for path in sorted((folder or SHIPPED).glob("*.safetensors"))}
