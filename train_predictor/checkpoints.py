"""Orbax checkpoints of a training run. Only the same run resumes from them, and only if they are undamaged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.config import ConfigError


class Checkpoints:
    """The last two checkpoints, in `folder/checkpoints`. `identity` (plain JSON values) identifies the run."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.folder, self.identity = folder.resolve() / "checkpoints", dict(identity)
        # Not in the background: the next training step donates the state.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, step: int, state: Any, log: Mapping[str, Any]) -> None:
        """Save `state`, a pytree of arrays, and `log`, plain JSON values."""
        record = {"identity": self.identity, "digest": digest(state), **log}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), log=ocp.args.JsonSave(record))
        self._manager.save(step, args=args)

    def log(self) -> dict[str, Any] | None:
        """The last checkpoint's log, None without a checkpoint. Raises `ConfigError` if it belongs to another run."""
        if (step := self._manager.latest_step()) is None:
            return None
        try:
            log = self._manager.restore(step, args=ocp.args.Composite(log=ocp.args.JsonRestore()))["log"]
            identity = dict(log.get("identity", {}))
        except Exception as error:
            raise self._damaged(step, error) from error
        if not identity:
            raise ConfigError(
                f"work: {self.folder} holds checkpoints of an earlier version, which do not name their run; set "
                "another `work`, or remove that folder"
            )
        differences = [
            f"{name}: {identity.get(name)} there, {self.identity.get(name)} here"
            for name in {**identity, **self.identity}
            if identity.get(name) != self.identity.get(name)
        ]
        if differences:
            raise ConfigError(
                f"work: {self.folder} holds checkpoints of a run with other settings ({'; '.join(differences)}); set "
                "another `work`, or remove that folder"
            )
        return log

    def restore(self, like: Any) -> Any:
        """The last checkpoint's state, with the structure of `like`. Raises `ConfigError` if it is damaged."""
        step = self._manager.latest_step()
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like), log=ocp.args.JsonRestore())
        try:
            saved = self._manager.restore(step, args=args)
            if digest(saved["state"]) != saved["log"]["digest"]:
                raise ValueError("its arrays are not those that were saved")
        except Exception as error:  # the storage layers raise anything
            raise self._damaged(step, error) from error
        return saved["state"]

    def _damaged(self, step: int | None, error: Exception) -> ConfigError:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return ConfigError(
            f"work: the checkpoint {self.folder / str(step)} is damaged ({lines[0][:200]}); remove that folder to "
            "resume from the one before, or all of them to start over"
        )


def digest(tree: Any) -> str:
    """SHA-256 of a pytree's arrays: types, shapes and bits."""
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        sha.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return sha.hexdigest()
