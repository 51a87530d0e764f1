"""Identifies the model whose answers a file holds. A drafter or length predictor learns one model's answers only."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxspec.models.load import LoadedModel

log = logging.getLogger(__name__)


class Origin(NamedTuple):
    """A model's name, and a digest that tells models of the same name apart."""

    name: str
    digest: str

    @property
    def fields(self) -> dict[str, str]:
        """The fields that identify the model in a row of answers."""
        return {"model": self.name, "model_digest": self.digest}

    def __str__(self) -> str:
        return f"{self.name} ({self.digest})"


def origin(model: LoadedModel) -> Origin:
    """The model's origin. The digest covers its sizes and the final norm's weights, which are small and which any
    training changes."""
    c = model.config
    digest = hashlib.sha256(repr((c.vocab_size, c.hidden_size, c.num_layers)).encode())
    digest.update(np.ascontiguousarray(model.weights["norm"], np.float32).tobytes())
    return Origin(model.name, digest.hexdigest()[:16])


class OtherModel(ValueError):
    """A file holds another model's answers; the message names the model."""


def check(rows: Iterable[Mapping[str, Any]], expected: Origin, where: str) -> None:
    """Raises `OtherModel` if a row is not of the `expected` model; `where` names the file.

    The digest decides, since one model can have two names (a folder and a built-in name). Rows from earlier versions
    name no model. They are accepted with a warning: they are probably right, and generating them again takes hours.
    """
    unnamed = 0
    for row in rows:
        name, digest = row.get("model"), row.get("model_digest")
        if name is None and digest is None:
            unnamed += 1
        elif digest is None and name != expected.name:
            raise OtherModel(f"{where} holds answers of {name}, not of {expected.name}")
        elif digest is not None and digest != expected.digest:
            same_name = name == expected.name
            other = f"another model that is also called {name}" if same_name else f"{name}, not of {expected.name}"
            raise OtherModel(f"{where} holds answers of {other}")
    if unnamed:
        log.warning(
            "%s: %d answers name no model, because an earlier version wrote them; assuming %s",
            where, unnamed, expected.name,
        )  # fmt: skip
