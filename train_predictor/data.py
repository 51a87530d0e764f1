"""Training data: prompts with the lengths of their answers, tokenised and split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.models.load import load_model
from jaxspec.models.load.bert import LoadedEncoder, check_encoder, load_bert
from jaxspec.predict.predictor import clip
from jaxspec.progress import progress
from jaxspec.train_predictor.answers import Origin, check_readable, has_ended, origin_of, read_data, token_ids
from jaxspec.train_predictor.config import PredictorConfig

#: Values of `Corpus.part`.
TRAIN, VALIDATION, TEST = 0, 1, 2
PARTS = ("train", "validation", "test")


class Tokenizer(Protocol):
    """The methods of the target's tokenizer that reading rows needs."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Row(NamedTuple):
    """One prompt and its answer's `length` in tokens of the target, end token included.

    `group` decides which part the row belongs to.
    """

    prompt: str
    length: int
    capped: bool
    group: str


@dataclass(frozen=True)
class Corpus:
    """The rows as arrays.

    texts, ids  prompts, as text and as the encoder's token ids int32
    length      `[rows]` int32, tokens of the answer; of a capped row those generated before the cut
    capped      `[rows]` bool, whether the answer was cut
    part        `[rows]` int8: TRAIN, VALIDATION or TEST
    """

    texts: list[str]
    ids: list[np.ndarray]
    length: np.ndarray
    capped: np.ndarray
    part: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self, part: int) -> np.ndarray:
        """Indices of a part's rows, ascending."""
        return np.flatnonzero(self.part == part)

    def digest(self) -> str:
        """Identifies the corpus: all but the texts."""
        sha = hashlib.sha256(self.length.tobytes() + self.capped.tobytes() + self.part.tobytes())
        for ids in self.ids:
            sha.update(len(ids).to_bytes(4, "little") + ids.tobytes())
        return sha.hexdigest()[:16]

    def __str__(self) -> str:
        counts = ", ".join(f"{int((self.part == i).sum())} {name}" for i, name in enumerate(PARTS))
        return f"{len(self)} rows ({counts}), {int(self.capped.sum())} capped"


def read_rows(
    paths: Sequence[str],
    tokenizer: Callable[[], Tokenizer],
    cap: int | None = None,
    limit: int | None = None,
    origin: Callable[[], Origin] | None = None,
) -> list[Row]:
    """Rows of all files in file order, up to `limit`.

    `tokenizer` and `origin` are the target's. `tokenizer` is called only for rows without text, `origin` only for rows
    with token ids. Without `origin`, answers of any model are taken.

    Raises `ConfigError` naming the field and the file, also where token ids are answers of another model.
    """
    check_readable("data", paths)  # before the target is loaded
    rows: list[Row] = []
    loaded: Tokenizer | None = None
    for path in paths:
        for line, where in read_data(path, origin, None if limit is None else limit - len(rows)):
            if "prompt_ids" not in line or {"prompt", "length"} <= line.keys():
                rows.append(_row_of_text(line, cap, where))
            else:
                loaded = loaded or tokenizer()
                rows.append(_row_of_ids(line, loaded, cap, where))
    if not rows:
        raise ConfigError(f"data: no rows in {', '.join(paths)}")
    return rows


def _row_of_text(line: Mapping[str, Any], cap: int | None, where: str) -> Row:
    match line:
        case {"prompt": str(prompt), "length": int(length)} if length > 0 and not isinstance(length, bool):
            capped = line.get("capped", cap is not None and length >= cap)
            if not isinstance(capped, bool):
                raise ConfigError(f'data: {where}: "capped" must be true or false, not {capped!r}')
            return Row(prompt, length, capped, str(line.get("group") or group_of(prompt)))
    raise ConfigError(
        f'data: {where}: needs "prompt", a text, and "length", a positive number of tokens; or "prompt_ids" and '
        '"output_ids"'
    )


def _row_of_ids(line: Mapping[str, Any], tokenizer: Tokenizer, cap: int | None, where: str) -> Row:
    prompt_ids, output_ids = token_ids(line, where)
    ended = has_ended(line, output_ids, tokenizer.eos_token_ids, cap)
    if not ended and cap is None and not isinstance(line.get("finished", line.get("capped")), bool):
        raise ConfigError(f"cap: this setting is needed, because {where} does not say whether its answer was cut")
    prompt = tokenizer.decode(prompt_ids)
    return Row(prompt, len(output_ids), not ended, str(line.get("group") or group_of(prompt)))


def group_of(prompt: str) -> str:
    """The group of a prompt that belongs to no multi-turn conversation."""
    return hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:16]


def part_of(group: str, validation: float, test: float) -> int:
    """TRAIN, VALIDATION or TEST, by the group's hash: the same in every run and file."""
    at = int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) / 2**32
    return TEST if at < test else VALIDATION if at < test + validation else TRAIN


def part_of_row(prompt: Sequence[int], group: str | None, tokenizer: Tokenizer, validation: float, test: float) -> int:
    """The part of an answer to a prompt of token ids; `group`: its file's name for the conversation, if it has one."""
    return part_of(group or group_of(tokenizer.decode(prompt)), validation, test)


def corpus(rows: Sequence[Row], clip: Callable[[str], Sequence[int]], validation: float, test: float) -> Corpus:
    """Tokenise and split the rows; `clip` gives a text's token ids.

    Raises `ConfigError` if a part is empty or every training row is capped.
    """
    ids = []
    with progress("prompts tokenised", len(rows)) as advance:
        for row in rows:
            ids.append(np.asarray(clip(row.prompt), np.int32))
            advance()
    part = np.asarray([part_of(row.group, validation, test) for row in rows], np.int8)
    for number, name in enumerate(PARTS):
        if not (part == number).any():
            groups = len({row.group for row in rows})
            raise ConfigError(f"data: {groups} conversations are too few: none of them fell into the {name} part")
    length = np.asarray([row.length for row in rows], np.int32)
    capped = np.asarray([row.capped for row in rows])
    if capped[part == TRAIN].all():
        raise ConfigError("data: every training answer was cut, so no length is known; collect with a higher cap")
    return Corpus([row.prompt for row in rows], ids, length, capped, part)


def batches(
    order: np.ndarray, width: Sequence[int], size: int, window: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Row indices of one epoch, in groups of `size` (the last of a window may be smaller) of similar `width`.

    `order`: the rows; `width`: tokens of every row of the corpus. The rows are shuffled, sorted by width only within
    windows of `window` rows, and each window's groups are shuffled again, so every epoch forms other groups.
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
    """Load the encoder and the data. Raises `ConfigError` naming the setting, and `ModelLoadError`."""
    check_encoder(config.encoder)
    target = cache(lambda: load_model(config.target))
    # The data first: the encoder may have to be downloaded.
    rows = read_rows(config.data, lambda: target().tokenizer, config.cap, config.limit, lambda: origin_of(target()))
    loaded = load_bert(config.encoder, config.layers)
    if config.longest > loaded.config.max_positions:
        raise ConfigError(f"longest: {config.encoder} reads {loaded.config.max_positions} tokens, not {config.longest}")
    return loaded, corpus(
        rows, lambda text: clip(loaded.tokenizer, text, config.longest), config.validation, config.test
    )
