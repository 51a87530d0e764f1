"""File format of a length index. Written atomically and checked completely when read.

Holds plain arrays instead of FAISS's own format: they can be validated, and building a flat index from them takes
milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from jaxspec.models.load.files import replacing
from jaxspec.predict.index import Rows

FORMAT = "jaxspec-lengths-1"
#: Least similarity of a fixed text's embeddings, in the file and now; below it the encoder is another one.
_SAME_ENCODER = 0.999


class IndexUnfit(ValueError):
    """A file is no valid length index, or belongs to another model or encoder; the message gives the reason."""


def write(path: Path, rows: Rows, model: str, probe: np.ndarray) -> None:
    """Replace the file atomically. `probe [H]` is the embedding of a fixed text. Raises `OSError`."""
    arrays = {
        "vectors": rows.vectors, "lengths": rows.lengths, "inserted": rows.inserted, "used": rows.used,
        "probe": np.asarray(probe, np.float32),
    }  # fmt: skip
    data = save(arrays, {"format": FORMAT, "model": model, "digest": _digest(arrays)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:  # if two engines write to one path, the last one's whole file stays
        new.write_bytes(data)


def read(path: Path, model: str, probe: np.ndarray) -> Rows:
    """The rows of a file. Raises `OSError` if it cannot be opened, `IndexUnfit` if it cannot be used."""
    with path.open("rb"):  # raises a plain OSError, unlike safe_open
        pass
    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            arrays: dict[str, np.ndarray] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except Exception as error:  # a damaged file may raise anything
        raise IndexUnfit(f"it cannot be read: {error!s:.300}") from None
    if about.get("format") != FORMAT:
        raise IndexUnfit(f"its format is {about.get('format')!r:.100}, not {FORMAT}")
    kinds = {"vectors": (2, "f4"), "lengths": (1, "f4"), "inserted": (1, "i8"), "used": (1, "i8"), "probe": (1, "f4")}
    for name, (dimensions, kind) in kinds.items():
        if name not in arrays or arrays[name].ndim != dimensions or arrays[name].dtype != np.dtype(kind):
            raise IndexUnfit(f"{name} is missing or has another shape or type")
    if _digest(arrays) != about.get("digest"):
        raise IndexUnfit("it is damaged: its content does not match its digest")
    if about.get("model") != model:
        raise IndexUnfit(f"it holds lengths of {about.get('model', ''):.200}, not of {model}")
    stored = arrays.pop("probe")
    if stored.shape != probe.shape or float(stored @ probe) < _SAME_ENCODER:
        raise IndexUnfit("its embeddings are another encoder's")
    rows = Rows(**arrays)
    if len({len(a) for a in arrays.values()}) != 1 or (len(rows) and rows.vectors.shape[1] != len(probe)):
        raise IndexUnfit("its arrays have inconsistent sizes")
    if not (np.isfinite(rows.vectors).all() and np.isfinite(rows.lengths).all() and (rows.lengths > 0).all()):
        raise IndexUnfit("it holds vectors that are not finite, or lengths that are not positive")
    return rows


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape}".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
