"""Earlier answers that suffix drafting draws on, by tenant, and the file that keeps them across restarts."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxspec.draft.suffix_index import SuffixIndex
from jaxspec.models.load.files import replacing

log = logging.getLogger(__name__)

_FORMAT = "jaxspec-answers-1"
#: Tenants whose answers are remembered, and slots of each hash table.
_TENANTS, _SLOTS = 16, 1 << 16
#: Shorter answers are not worth remembering.
_SHORTEST = 8
#: The tenant of all answers, if they are shared.
_ALL = ""


class UnfitMemory(ValueError):
    """A file holds no answers that can be used here; the message gives the reason."""


class SuffixMemory:
    """The last `capacity` tokens of answers to each tenant (an API key).

    `shared`: all tenants have one memory. Of several, the 16 that were answered last are remembered. `path`: the file
    that keeps the answers, which are those of `model`.
    """

    def __init__(self, capacity: int, shared: bool = False, path: Path | None = None, model: str = "") -> None:
        """Raises `OSError`, and `UnfitMemory` if the file is damaged, another model's, or not shared as here."""
        self._capacity, self._shared, self._path, self._model = capacity, shared, path, model
        self._answers: OrderedDict[str, SuffixIndex] = OrderedDict()
        if path is not None and path.exists():
            self._read(path)
        self._unsaved = False

    def of(self, tenant: str) -> SuffixIndex | None:
        """The answers that this tenant's drafts may be made of."""
        return self._answers.get(_ALL if self._shared else tenant)

    def learn(self, tenant: str, answer: Sequence[int]) -> None:
        if len(answer) < _SHORTEST:
            return
        self._unsaved = True
        tenant = _ALL if self._shared else tenant
        if (index := self._answers.get(tenant)) is None:
            index = self._answers[tenant] = SuffixIndex(self._capacity, _SLOTS)
        self._answers.move_to_end(tenant)
        if len(self._answers) > _TENANTS:
            self._answers.popitem(last=False)
        index.extend(answer)
        index.end_text()

    def flush(self) -> None:
        """Write the file if there are answers that it lacks. A failure is logged. Only the file's owner can read it: it
        holds answers as token ids."""
        if self._path is None or not self._unsaved:
            return
        tensors = {str(i): index.tokens() for i, index in enumerate(self._answers.values())}
        about = {
            "format": _FORMAT, "model": self._model, "shared": json.dumps(self._shared),
            "tenants": json.dumps(list(self._answers)),
        }  # fmt: skip
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path, mode=0o600) as new:
                save_file(tensors, new, about)
        except (OSError, SafetensorError) as error:
            log.warning("suffix_path: cannot write %s: %s", self._path, error)
        else:
            self._unsaved = False

    def _read(self, path: Path) -> None:
        with path.open("rb"):  # raises a plain OSError, unlike safe_open
            pass
        try:
            with safe_open(path, framework="numpy") as file:
                about = file.metadata() or {}
                if about.get("format") != _FORMAT:
                    raise UnfitMemory("it is no file of answers")
                tenants, shared = json.loads(about["tenants"]), json.loads(about["shared"])
                found = [file.get_tensor(str(i)) for i in range(len(tenants))]
        except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UnfitMemory(f"{error!s:.300}") from None
        if not all(isinstance(t, str) for t in tenants) or any(t.ndim != 1 or t.dtype.kind != "i" for t in found):
            raise UnfitMemory("it is damaged")
        if about.get("model") != self._model:
            raise UnfitMemory(f"it holds answers of {about.get('model', ''):.200}, not of {self._model}")
        if shared != self._shared:
            kept = "all API keys together" if shared else "each API key on its own"
            raise UnfitMemory(f"it holds the answers of {kept}, suffix_shared says otherwise")
        for tenant, tokens in zip(tenants, found, strict=True):
            ends = np.flatnonzero(tokens < 0)
            for answer in np.split(tokens, ends + 1):
                self.learn(tenant, answer[answer >= 0].tolist())
