"""Checkpoints of a run: kept with Orbax, and taken up again only by the same run, unharmed."""

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
    """The last two checkpoints in `folder/checkpoints`; `identity` (plain JSON values) is what a run goes by."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.folder, self.identity = folder.resolve() / "checkpoints", dict(identity)
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, step: int, state: Any, log: Mapping[str, Any]) -> None:
        """`state`: a tree of arrays; `log`: plain JSON values."""
        written = {"identity": self.identity, "digest": digest(state), **log}
        kinds = ocp.args.Composite(state=ocp.args.StandardSave(state), log=ocp.args.JsonSave(written))
        self._manager.save(step, args=kinds)
        self._manager.wait_until_finished()  # the next step donates the state

    def log(self) -> dict[str, Any] | None:
        """Of the last checkpoint; none if there is none. Raises `ConfigError` if it is of another run."""
        if (step := self._manager.latest_step()) is None:
            return None
        try:
            log = self._manager.restore(step, args=ocp.args.Composite(log=ocp.args.JsonRestore()))["log"]
            identity = dict(log.get("identity", {}))
        except Exception as error:
            raise self._damaged(step, error) from error
        if not identity:
            raise ConfigError(
                f"work: {self.folder} holds checkpoints of an earlier version, which do not say of which run; set "
                "another `work`, or remove that folder"
            )
        other = [
            f"{name}: {identity.get(name)} there, {self.identity.get(name)} here"
            for name in {**identity, **self.identity}
            if identity.get(name) != self.identity.get(name)
        ]
        if other:
            raise ConfigError(
                f"work: {self.folder} holds checkpoints of a run with other settings ({'; '.join(other)}); set another "
                "`work`, or remove that folder"
            )
        return log

    def restore(self, like: Any) -> Any:
        """The last checkpoint's state, a tree as `like`. Raises `ConfigError` if it is damaged."""
        step = self._manager.latest_step()
        kinds = ocp.args.Composite(state=ocp.args.StandardRestore(like), log=ocp.args.JsonRestore())
        try:
            found = self._manager.restore(step, args=kinds)
            if digest(found["state"]) != found["log"]["digest"]:
                raise ValueError("its arrays are not those that were saved")
        except Exception as error:  # the storage raises whatever its layers do
            raise self._damaged(step, error) from error
        return found["state"]

    def _damaged(self, step: int | None, error: Exception) -> ConfigError:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return ConfigError(
            f"work: the checkpoint {self.folder / str(step)} is damaged ({lines[0][:200]}); remove that folder to go "
            "on from the one before, or all of them to start anew"
        )


def digest(tree: Any) -> str:
    """Tells one tree of arrays from another, to the bit."""
    of = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        of.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return of.hexdigest()
