"""Training data: served answers with their lengths, tokenised and split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.draft.distill.lines import check_readable, read_lines
from jaxspec.errors import explained, reason
from jaxspec.models.load import load_model
from jaxspec.models.load.bert import LoadedEncoder, load_bert
from jaxspec.predict.predictor import clip
from jaxspec.progress import progress
from jaxspec.train_predictor.config import PredictorConfig

#: Parts of the data, as numbers in `Corpus.part`.
TRAIN, VALIDATION, TEST = 0, 1, 2
PARTS = ("train", "validation", "test")


class Tokenizer(Protocol):
    """The target's: what is asked of it here."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Row(NamedTuple):
    """`group` decides the part; `length` in output tokens of the target, its end token included."""

    prompt: str
    length: int
    capped: bool
    group: str


@dataclass(frozen=True)
class Corpus:
    """`[rows]` each: prompts as text and as the encoder's token ids, lengths int32 (of a capped row: what was written
    before it was cut), capped bool, part int8."""

    texts: list[str]
    ids: list[np.ndarray]
    length: np.ndarray
    capped: np.ndarray
    part: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self, part: int) -> np.ndarray:
        """Numbers of the rows of a part, ascending."""
        return np.flatnonzero(self.part == part)

    def digest(self) -> str:
        """Tells one corpus from another."""
        of = hashlib.sha256(self.length.tobytes() + self.capped.tobytes() + self.part.tobytes())
        for ids in self.ids:
            of.update(len(ids).to_bytes(4, "little") + ids.tobytes())
        return of.hexdigest()[:16]

    def __str__(self) -> str:
        counts = ", ".join(f"{int((self.part == i).sum())} {name}" for i, name in enumerate(PARTS))
        return f"{len(self)} rows ({counts}), {int(self.capped.sum())} capped"


def read_rows(
    paths: Sequence[str], tokenizer: Callable[[], Tokenizer], cap: int | None = None, limit: int | None = None
) -> list[Row]:
    """Rows of all files in their order, up to `limit`. `tokenizer` is called only if a file holds token ids.

    Raises `ConfigError` naming the field and the file.
    """
    try:
        check_readable(paths)  # before the model is loaded whose tokens one of them holds
    except OSError as error:
        raise ConfigError(f"data: cannot read {explained(error)}") from None
    rows: list[Row] = []
    loaded: Tokenizer | None = None
    for path in paths:
        try:
            for number, line in enumerate(read_lines(Path(path)), 1):
                if len(rows) == limit:
                    return rows
                if "prompt_ids" in line:
                    loaded = loaded or tokenizer()
                    rows.append(_of_ids(line, loaded, cap, f"{path}, row {number}"))
                else:
                    rows.append(_of_text(line, cap, f"{path}, row {number}"))
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"data: cannot read {path}: {reason(error)}") from None
    if not rows:
        raise ConfigError(f"data: no rows in {', '.join(paths)}")
    return rows


def _of_text(line: Mapping[str, Any], cap: int | None, where: str) -> Row:
    match line:
        case {"prompt": str(prompt), "length": int(length)} if length > 0 and not isinstance(length, bool):
            capped = line.get("capped", cap is not None and length >= cap)
            if not isinstance(capped, bool):
                raise ConfigError(f'data: {where}: "capped" must be true or false, not {capped!r}')
            return Row(prompt, length, capped, str(line.get("group") or group_of(prompt)))
    raise ConfigError(
        f'data: {where}: needs "prompt", a text, and "length", a positive number of tokens, or "prompt_ids" and '
        '"output_ids"'
    )


def _of_ids(line: Mapping[str, Any], tokenizer: Tokenizer, cap: int | None, where: str) -> Row:
    prompt_ids, output_ids = line["prompt_ids"], line.get("output_ids")
    if not (_ids(prompt_ids) and _ids(output_ids) and output_ids):
        raise ConfigError(
            f'data: {where}: "prompt_ids" and "output_ids" must be lists of token ids, the latter not empty'
        )
    ended = output_ids[-1] in tokenizer.eos_token_ids
    match line.get("finished"):
        case bool(finished):
            capped = not finished
        case _ if ended:
            capped = False
        case _ if cap is None:
            raise ConfigError(f"cap: this setting is needed, as {where} does not say whether its answer was cut")
        case _:
            capped = len(output_ids) >= cap
    prompt = tokenizer.decode(prompt_ids)
    return Row(prompt, len(output_ids), capped, group_of(prompt))


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) and i >= 0 for i in value)


def group_of(prompt: str) -> str:
    """What decides a prompt's part where it belongs to no conversation of several turns."""
    return hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:16]


def part_of(group: str, validation: float, test: float) -> int:
    """The same for a group in every run and file."""
    at = int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) / 2**32
    return TEST if at < test else VALIDATION if at < test + validation else TRAIN


def corpus(rows: Sequence[Row], clip: Callable[[str], Sequence[int]], validation: float, test: float) -> Corpus:
    """Rows as the encoder reads them; `clip` gives a text's token ids. Raises `ConfigError` if a part is empty."""
    ids = []
    with progress("prompts tokenised", len(rows)) as advance:
        for row in rows:
            ids.append(np.asarray(clip(row.prompt), np.int32))
            advance()
    part = np.asarray([part_of(row.group, validation, test) for row in rows], np.int8)
    for number, name in enumerate(PARTS):
        if not (part == number).any():
            groups = len({row.group for row in rows})
            raise ConfigError(f"data: {groups} conversations are too few: by chance none of them is in the {name} part")
    length = np.asarray([row.length for row in rows], np.int32)
    capped = np.asarray([row.capped for row in rows])
    if capped[part == TRAIN].all():
        raise ConfigError("data: every answer to train on was cut, so no length is known; collect with a higher cap")
    return Corpus([row.prompt for row in rows], ids, length, capped, part)


def batches(
    order: np.ndarray, width: Sequence[int], size: int, window: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """One epoch of row numbers in groups of `size` (the last may be smaller), rows of like `width` together.

    `order`: the rows; `width`: of every row of the corpus, in tokens. Rows are shuffled, sorted by width within windows
    of `window` rows only, and the groups of each window are shuffled again, so that no epoch repeats another's groups.
    """
    widths = np.asarray(width)
    shuffled = rng.permutation(order)
    for start in range(0, len(shuffled), window):
        part = shuffled[start : start + window]
        part = part[np.argsort(widths[part], kind="stable")]
        groups = [part[i : i + size] for i in range(0, len(part), size)]
        for i in rng.permutation(len(groups)):
            yield groups[i]


def prepare(config: PredictorConfig) -> tuple[LoadedEncoder, Corpus]:
    """Raises `ConfigError` naming the setting, and `ModelLoadError`."""
    # First what is here, then what may have to be downloaded.
    rows = read_rows(config.data, lambda: load_model(config.target).tokenizer, config.cap, config.limit)
    loaded = load_bert(config.encoder, config.layers)
    if config.longest > loaded.config.max_positions:
        raise ConfigError(f"longest: {config.encoder} reads {loaded.config.max_positions} tokens, not {config.longest}")
    return loaded, corpus(
        rows, lambda text: clip(loaded.tokenizer, text, config.longest), config.validation, config.test
    )
