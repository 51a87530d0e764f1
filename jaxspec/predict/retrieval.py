"""ALISE's predictor (§3.1, Algorithm 1): the answer lengths of similar prompts, else the proxy's prediction."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from jaxspec.predict import index_file
from jaxspec.predict.index import LengthIndex, Neighbours
from jaxspec.predict.predictor import LengthPredictor, TextEncoder

log = logging.getLogger(__name__)

#: Texts whose embeddings and predictions are cached: they are needed again when the answer ends or the prompt repeats.
_REMEMBERED = 1024
#: Its embedding identifies the encoder.
_PROBE = "How long will the answer be?"


@dataclass(slots=True)
class _Read:
    """A text's embedding `[H]` float32, and the proxy's prediction if it was needed."""

    vector: np.ndarray
    proxied: float | None = None


class RetrievalPredictor:
    """Looks up similar prompts among those served. If there are none, `proxy` predicts; its head is the paper's MLP.

    `encoder` embeds what `user_text` leaves of a prompt: a template makes all prompts alike. `path` is the file that
    keeps the index across restarts (None keeps nothing). An unusable file is renamed, with a warning. `model` is the
    name of the model that gives the answers.
    """

    def __init__(
        self,
        proxy: LengthPredictor,
        encoder: TextEncoder,
        index: LengthIndex,
        model: str,
        path: Path | None = None,
        user_text: Callable[[str], str] = lambda text: text,
    ) -> None:
        self._proxy, self._encoder, self.index, self._model, self._path = proxy, encoder, index, model, path
        self._user_text = user_text
        self._read: OrderedDict[str, _Read] = OrderedDict()
        self._probe: np.ndarray | None = None
        self._unsaved = False
        self._warned = False
        #: Number of predictions for prompts with similar ones, and for others.
        self.found = 0
        self.asked = 0

    @property
    def name(self) -> str:
        return f"retrieval with {self._encoder.name} over {self._proxy.name}"

    def programs(self) -> list[tuple[str, Callable[[], None]]]:
        """Compile jobs of the encoder and of the proxy."""
        return [*self._encoder.programs(), *self._proxy.programs()]

    def warm_up(self) -> None:
        """Compile encoder and proxy, and load the file."""
        self._encoder.warm_up()
        self._proxy.warm_up()
        self._probe = self._encoder.embed([_PROBE])[0]
        if self._path is not None:
            self._load(self._path)

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        """Predicted output tokens `[n]` float64. The proxy reads only texts without similar ones."""
        if not texts:
            return np.zeros(0)
        known = self._embedded(texts)
        near = self.index.near(np.stack([known[text].vector for text in texts]))
        asked = [text for text, n in zip(texts, near, strict=True) if self._asks_proxy(n)]
        if new := [text for text in dict.fromkeys(asked) if known[text].proxied is None]:
            for text, length in zip(new, self._proxy.predict(new).tolist(), strict=True):
                known[text].proxied = length
        self.found += sum(len(n) > 0 for n in near)
        self.asked += sum(not len(n) for n in near)
        return np.asarray([self._length(n, known[text].proxied) for text, n in zip(texts, near, strict=True)])

    def _asks_proxy(self, near: Neighbours) -> bool:
        return not len(near)

    def _length(self, near: Neighbours, proxied: float | None) -> float:
        """The prediction for a prompt with these neighbours. `proxied`: the proxy's prediction, if it was asked."""
        return near.mean if proxied is None or len(near) else proxied

    def _embedded(self, texts: Sequence[str]) -> dict[str, _Read]:
        """What is known of each text, its embedding included. Recent texts come from a cache."""
        known = {text: self._read[text] for text in texts if text in self._read}
        if new := [text for text in dict.fromkeys(texts) if text not in known]:
            vectors = self._encoder.embed([self._user_text(text) for text in new])
            known |= {text: _Read(vector) for text, vector in zip(new, vectors, strict=True)}
        for text, result in known.items():
            self._read[text] = result
            self._read.move_to_end(text)
        while len(self._read) > _REMEMBERED:
            self._read.popitem(last=False)
        return known

    def learn(self, texts: Sequence[str], lengths: Sequence[int]) -> None:
        """Learn the true output tokens of these prompts."""
        if texts:
            known = self._embedded(texts)
            self.index.insert(np.stack([known[text].vector for text in texts]), lengths)
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
