"""Whose answers a file holds: training text for one model teaches another one nonsense."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxspec.models.load import LoadedModel

log = logging.getLogger(__name__)


class Origin(NamedTuple):
    """A model by its name, and by a digest that tells models of one name apart."""

    name: str
    digest: str

    @property
    def fields(self) -> dict[str, str]:
        """As a row of answers holds it."""
        return {"model": self.name, "model_digest": self.digest}

    def __str__(self) -> str:
        return f"{self.name} ({self.digest})"


def origin(model: LoadedModel) -> Origin:
    """The digest is of the sizes and the last norm's weights: every training changes those, and they are small."""
    c = model.config
    digest = hashlib.sha256(repr((c.vocab_size, c.hidden_size, c.num_layers)).encode())
    digest.update(np.ascontiguousarray(model.weights["norm"], np.float32).tobytes())
    return Origin(model.name, digest.hexdigest()[:16])


class OtherModel(ValueError):
    """Answers are of another model; the message says whose."""


def check(rows: Iterable[Mapping[str, Any]], own: Origin, where: str) -> None:
    """Raises `OtherModel` naming the first row's model that is not `own`.

    The digest decides: one model may go by two names, as a folder and as a built-in. Rows of earlier versions name no
    model. They are taken, because to answer anew costs hours and nothing says that they are wrong; one line warns.
    """
    unnamed = 0
    for row in rows:
        name, digest = row.get("model"), row.get("model_digest")
        if name is None and digest is None:
            unnamed += 1
        elif digest is None and name != own.name:
            raise OtherModel(f"{where} holds answers of {name}, not of {own.name}")
        elif digest is not None and digest != own.digest:
            other = f"another model that is called {name} too" if name == own.name else f"{name}, not of {own.name}"
            raise OtherModel(f"{where} holds answers of {other}")
    if unnamed:
        log.warning(
            "%s: %d answers name no model, as an earlier version wrote them; they are taken to be of %s",
            where, unnamed, own.name,
        )  # fmt: skip
