"""An index of lengths on disk: whole or not there, and never trusted unread.

Plain arrays rather than FAISS's own format: what they must be like can be checked, and a flat index is made of them in
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
#: The same text's embedding now and when the file was written are at least so similar, or the encoder is another one.
_SAME_ENCODER = 0.999


class IndexUnfit(ValueError):
    """A file that is no index of lengths, or none for this model and encoder; the message says why."""


def write(path: Path, rows: Rows, model: str, probe: np.ndarray) -> None:
    """Replace the file at once. `probe` `[H]` is the embedding of a fixed text. Raises OSError."""
    arrays = {
        "vectors": rows.vectors, "lengths": rows.lengths, "inserted": rows.inserted, "used": rows.used,
        "probe": np.asarray(probe, np.float32),
    }  # fmt: skip
    data = save(arrays, {"format": FORMAT, "model": model, "digest": _digest(arrays)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:  # two engines may write to the same path, and the last one wins, whole
        new.write_bytes(data)


def read(path: Path, model: str, probe: np.ndarray) -> Rows:
    """The rows of a file. Raises `IndexUnfit`, or OSError where there is none or it can't be opened."""
    with path.open("rb"):  # a plain OSError for what is missing or forbidden
        pass
    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            arrays: dict[str, np.ndarray] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except Exception as error:  # whatever a damaged file brings about
        raise IndexUnfit(f"it cannot be read: {error}") from None
    if about.get("format") != FORMAT:
        raise IndexUnfit(f"its format is {about.get('format')!r}, not {FORMAT}")
    kinds = {"vectors": (2, "f4"), "lengths": (1, "f4"), "inserted": (1, "i8"), "used": (1, "i8"), "probe": (1, "f4")}
    for name, (dimensions, kind) in kinds.items():
        if name not in arrays or arrays[name].ndim != dimensions or arrays[name].dtype != np.dtype(kind):
            raise IndexUnfit(f"{name} is missing or of another kind")
    if _digest(arrays) != about.get("digest"):
        raise IndexUnfit("it is damaged: its contents are not what was written")
    if about.get("model") != model:
        raise IndexUnfit(f"it holds lengths of {about.get('model')}, not of {model}")
    own = arrays.pop("probe")
    if own.shape != probe.shape or float(own @ probe) < _SAME_ENCODER:
        raise IndexUnfit("its embeddings are another encoder's")
    rows = Rows(**arrays)
    if len({len(a) for a in arrays.values()}) != 1 or (len(rows) and rows.vectors.shape[1] != len(probe)):
        raise IndexUnfit("its arrays don't fit each other")
    if not (np.isfinite(rows.vectors).all() and np.isfinite(rows.lengths).all() and (rows.lengths > 0).all()):
        raise IndexUnfit("it holds what is no number, or no length")
    return rows


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape}".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
