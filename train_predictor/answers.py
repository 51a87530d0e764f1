"""Files of answers: JSONL that may still be written to, and the model whose answers a file holds.

`jaxspec.train_predictor.collect` writes them; length predictors and drafters are trained on them, each on the answers
of one model only.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.errors import explained, reason
from jaxspec.models.load import LoadedModel
from jaxspec.train_predictor.names import answers_file

log = logging.getLogger(__name__)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file. Blank lines and an incomplete last line are skipped: its writer may still be at work.

    Raises `OSError`, and `ValueError` naming the file and the line.
    """
    with path.open("rb") as file:  # bytes, because the cut may split a character
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise ValueError(f"{path}, line {number}: not JSON") from None
                return  # incomplete last line: a proper prefix of a JSON object is never valid JSON
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object")
            yield row


def mend(path: Path) -> None:
    """Truncate a file after its last complete line, so that rows can be appended."""
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def check_readable(setting: str, paths: Sequence[str]) -> None:
    """Raises `ConfigError` for a file that cannot be opened, so that this is reported before a model is loaded."""
    for path in paths:
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{setting}: cannot read {explained(error)}") from None


def check_answers(setting: str, paths: Sequence[str], target: str) -> None:
    """`check_readable`, which says how to collect a target's answers where none have been."""
    if list(paths) == [default := answers_file(target)] and not Path(default).exists():
        raise ConfigError(
            f"{setting}: there is no {default} yet; collect it first: python -m jaxspec.train_predictor.collect "
            f"--model {target} --prompts FILE"
        )
    check_readable(setting, paths)


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


def origin_of(model: LoadedModel) -> Origin:
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
    name no model. They are accepted with a warning: they are probably right, and collecting them again takes hours.
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


def read_data(
    path: str, target: Callable[[], Origin] | None = None, limit: int | None = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """The first `limit` lines of a training file, each with its place for messages.

    `target` is called if there are token ids, which must be its answers; without it, any model's are taken. Raises
    `ConfigError` naming the field `data`.
    """
    try:
        lines = list(islice(read_lines(Path(path)), limit))
        with_ids = [line for line in lines if "prompt_ids" in line]
        if with_ids and target is not None:
            check(with_ids, target(), path)
    except OtherModel as error:
        raise ConfigError(f"data: {error}: set another `target`, or collect answers of this one") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: cannot read {path}: {reason(error)}") from None
    return ((line, f"{path}, row {number}") for number, line in enumerate(lines, 1))


def token_ids(line: Mapping[str, Any], where: str) -> tuple[list[int], list[int]]:
    """A line's prompt and answer. Raises `ConfigError` if they are not token ids or the answer is empty."""
    prompt, answer = line.get("prompt_ids"), line.get("output_ids")
    if not (_are_ids(prompt) and _are_ids(answer) and answer):
        raise ConfigError(
            f'data: {where}: "prompt_ids" and "output_ids" must be lists of token ids, "output_ids" not empty'
        )
    return prompt, answer


def has_ended(line: Mapping[str, Any], answer: Sequence[int], ends: Container[int], cap: int | None = None) -> bool:
    """Whether a line's answer ended by itself, not cut: as its "finished" or "capped" says; else if its last token is
    one of `ends`, or if it has fewer than `cap` tokens."""
    for name, wanted in (("finished", True), ("capped", False)):
        if isinstance(said := line.get(name), bool):
            return said is wanted
    return answer[-1] in ends or (cap is not None and len(answer) < cap)


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(i, int) and i >= 0 for i in value)
