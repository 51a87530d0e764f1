"""Files of what is trained for a model, named after it, such as `trained/NAME/NAME-length.safetensors`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Folder of the folders of all targets, in the current one.
TRAINED = "trained"
#: Kinds of trained files: the presets of predictor and drafter, and the probe.
LENGTH, DRAFTER, PROBE = "length", "eagle", "probe"


def target_name(target: str) -> str:
    """A model's name for files, from its built-in name, folder, .gguf file or hub id. Loads nothing."""
    path = Path(target).expanduser()
    name = path.resolve().name if path.is_dir() else path.name.removesuffix(".gguf")
    return re.sub(r"[^\w.-]", "-", name)  # a hub id may end with :Q4_K_M


def work_folder(target: str) -> str:
    """The folder of a target's answers, runs and results."""
    return f"{TRAINED}/{target_name(target)}"


def answers_file(target: str) -> str:
    """The file of a target's answers."""
    return f"{work_folder(target)}/answers.jsonl"


def trained_file(target: str, kind: str) -> str:
    """The file of a target's trained predictor, probe or drafter. `kind`: one of the above, or another
    preset's name."""
    return f"{work_folder(target)}/{target_name(target)}-{kind}.safetensors"


def defaults(preset: str | Path, target: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`data`, `work` and `out` for the target of these settings, or for `target`. `preset`: the YAML file."""
    target = str(settings.get("target", target))
    out = trained_file(target, Path(preset).stem)
    return {"data": [answers_file(target)], "work": work_folder(target), "out": out}
