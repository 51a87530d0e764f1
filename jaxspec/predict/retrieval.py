"""ALISE's predictor (§3.1, Algorithm 1): the answer lengths of similar prompts, else the proxy's prediction."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from jaxspec.predict import index_file
from jaxspec.predict.index import LengthIndex
from jaxspec.predict.predictor import LengthPredictor

log = logging.getLogger(__name__)

#: Texts whose encoder results are cached: they are needed again when the answer ends or the prompt is repeated.
_REMEMBERED = 1024
#: Its embedding identifies the encoder.
_PROBE = "How long will the answer be?"


class RetrievalPredictor:
    """Looks up similar prompts among those served. If there are none, `proxy` predicts; its head is the paper's MLP.

    `path` is the file that keeps the index across restarts (None keeps nothing). An unusable file is renamed, with a
    warning. `model` is the name of the model that gives the answers.
    """

    def __init__(self, proxy: LengthPredictor, index: LengthIndex, model: str, path: Path | None = None) -> None:
        self._proxy, self.index, self._model, self._path = proxy, index, model, path
        self._read: OrderedDict[str, tuple[float, np.ndarray]] = OrderedDict()
        self._probe: np.ndarray | None = None
        self._unsaved = False
        self._warned = False
        #: Number of predictions from neighbours, and from the proxy.
        self.found = 0
        self.asked = 0

    @property
    def name(self) -> str:
        return f"retrieval over {self._proxy.name}"

    @property
    def digest(self) -> str:
        return self._proxy.digest

    def programs(self, embeddings: bool = True) -> list[tuple[str, Callable[[], None]]]:
        """Compile jobs of the encoder, always with embeddings."""
        return self._proxy.programs(embeddings=True)

    def warm_up(self, embeddings: bool = True) -> None:
        """Compile the encoder and load the file."""
        self._proxy.warm_up(embeddings=True)
        self._probe = self._proxy.embed([_PROBE])[0]
        if self._path is not None:
            self._load(self._path)

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        """Predicted output tokens `[n]` float64."""
        if not texts:
            return np.zeros(0)
        proxied, vectors = self.read(texts)
        out = self.index.estimate(vectors)
        unknown = np.isnan(out)
        out[unknown] = proxied[unknown]
        self.found += int((~unknown).sum())
        self.asked += int(unknown.sum())
        return out

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings `[n, H]` float32, unit vectors."""
        return self.read(texts)[1]

    def read(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The proxy's lengths `[n]` and embeddings `[n, H]`. Recent texts come from a cache."""
        if not texts:
            return np.zeros(0), np.zeros((0, 0), np.float32)
        known = {text: self._read[text] for text in texts if text in self._read}
        if new := [text for text in dict.fromkeys(texts) if text not in known]:
            known |= zip(new, zip(*self._proxy.read(new), strict=True), strict=True)
        for text, result in known.items():
            self._read[text] = result
            self._read.move_to_end(text)
        while len(self._read) > _REMEMBERED:
            self._read.popitem(last=False)
        return (
            np.array([known[text][0] for text in texts], np.float64),
            np.stack([known[text][1] for text in texts]).astype(np.float32),
        )

    def learn(self, texts: Sequence[str], lengths: Sequence[int]) -> None:
        if texts:
            self.index.insert(self.embed(texts), lengths)
            self._unsaved = True

    def flush(self) -> None:
        """Write the index if something was learned since the last time. A write error is logged once."""
        if self._path is None or not self._unsaved or self._probe is None:
            return
        self._unsaved = False
        try:
            index_file.write(self._path, self.index.rows(), self._model, self._probe)
        except OSError as error:
            if not self._warned:
                log.warning("cannot write the lengths of served requests to %s: %s", self._path, error)
            self._unsaved = self._warned = True

    def _load(self, path: Path) -> None:
        assert self._probe is not None
        try:
            self.index.restore(index_file.read(path, self._model, self._probe))
            log.info("%d lengths of served requests read from %s", len(self.index), path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self._path = None  # the file may be intact, so do not overwrite it
            log.warning("cannot read the lengths of served requests in %s (%s); new ones are not kept", path, error)
        except index_file.IndexUnfit as unfit:
            names = (path.with_name(f"{path.name}.unusable{n or ''}") for n in count())
            aside = next(name for name in names if not name.exists())
            try:
                os.replace(path, aside)
                outcome = f"it was renamed to {aside}"
            except OSError as error:
                outcome = f"it cannot be renamed ({error}), so new lengths are not kept"
                self._path = None
            log.warning("cannot use the lengths of served requests in %s: %s; %s", path, unfit, outcome)
