"""Training data: the target's answers as padded rows of tokens, with the target's features, which are cached."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.models.decoder import Decoder, device_weights
from jaxspec.models.drafter import feature_width, tapped_layers, target_features
from jaxspec.models.load import LoadedModel
from jaxspec.progress import progress
from jaxspec.train_predictor.answers import Origin, has_ended, origin_of, read_data, token_ids

T = TypeVar("T")

#: One in `HELD_OUT` prompts is held out, with all answers to it.
HELD_OUT = 25
#: Tokens that a prompt must leave for its answer.
ROOM = 8
#: The multiple that rows are padded to: each length compiles once. A GPU compiles longer than it takes to compute the
#: padding.
_MULTIPLE, _GPU_MULTIPLE = 64, 192
#: Rows per batch of feature computation. A GPU computes more in the same time, if their attention scores fit: positions
#: times positions of all rows of a batch.
_ROWS, _GPU_ROWS, _GPU_SCORES = 8, 32, 32 * 384**2


class Row(NamedTuple):
    """A prompt and an answer to it, as token ids. `key` is the same for all answers to a prompt, in any file, and for
    all turns of a conversation. `ended`: the answer ends with its last token, else it was cut there. `group` and
    `temperature`: of the file's line, if it has them."""

    key: str
    prompt: list[int]
    answer: list[int]
    ended: bool
    group: str | None = None
    temperature: float | None = None


@dataclass
class Corpus:
    """N rows of length L.

    tokens    `[N, L]` int32: prompt, answer, zeros
    features  `[N, L, TAPS * hidden]` float16: the target's, see `jaxspec.models.drafter`
    start     `[N]` int32: index of the answer's first token
    length    `[N]` int32: tokens of prompt and answer
    held_out  `[N]` bool: not trained on
    ended     `[N]` bool: the answer ends with its last token; else it was cut there
    """

    tokens: np.ndarray
    features: np.ndarray
    start: np.ndarray
    length: np.ndarray
    held_out: np.ndarray
    ended: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def digest(self) -> str:
        """Identifies the corpus: all but the features."""
        sha = hashlib.sha256()
        for part in (self.tokens, self.start, self.length, self.held_out):
            sha.update(part.tobytes())
        return sha.hexdigest()[:16]

    @property
    def answer_tokens(self) -> int:
        return int((self.length - self.start).sum())


def read_rows(paths: Sequence[str], longest: int, target: Origin | None = None, ends: Container[int] = ()) -> list[Row]:
    """The rows of all files that `fitting` keeps. Raises `ConfigError` naming the field `data`."""
    return fitting(whole_rows(paths, target, ends), longest)


def whole_rows(paths: Sequence[str], target: Origin | None = None, ends: Container[int] = ()) -> list[Row]:
    """The rows of all files, uncut. Where a line does not say whether its answer ended, one that ends with a token of
    `ends` did.

    Raises `ConfigError` naming the field `data`, also if an answer is another model's than `target`'s.
    """
    origin = None if target is None else lambda: target
    lines = [(line, *token_ids(line, where)) for path in paths for line, where in read_data(path, origin)]
    if not lines:
        raise ConfigError(f"data: no answers in {', '.join(paths)}")
    # A later turn's prompt holds the turns before it, so the first prompt decides for all of them.
    firsts = {str(line.get("group")): _bytes(prompt) for line, prompt, _ in lines if not line.get("turn")}
    rows = []
    for line, prompt, answer in lines:
        group = str(line["group"]) if line.get("turn") and "group" in line else None
        first = _bytes(prompt) if group is None else firsts.get(group, group.encode())
        key, ended = hashlib.sha256(first).hexdigest(), has_ended(line, answer, ends)
        rows.append(Row(key, prompt, answer, ended, line.get("group"), line.get("temperature")))
    return rows


def fitting(rows: Sequence[Row], longest: int) -> list[Row]:
    """The rows, their answers cut so that prompt and answer fit `longest`. Prompts that leave no room for an answer,
    and answers of one token, are left out. Raises `ConfigError` naming the field `data` if no row is left."""
    out = []
    for row in rows:
        if _has_room(row, longest) and len(row.answer) > 1:
            kept = row.answer[: longest - len(row.prompt)]
            out.append(row._replace(answer=kept, ended=row.ended and len(kept) == len(row.answer)))
    if not out:
        raise ConfigError(f"data: no answers of two tokens or more to prompts under {longest - ROOM} tokens")
    return out


def lost(rows: Sequence[Row], longest: int, setting: str) -> str:
    """How many answers `fitting` cuts and leaves out, in a sentence that names the `setting`; empty for none."""
    room = [row for row in rows if _has_room(row, longest)]
    cut = sum(len(row.prompt) + len(row.answer) > longest for row in room)
    single = sum(len(row.answer) < 2 for row in room)
    said = [
        f"{count} {what}"
        for count, what in (
            (cut, f"are cut at {longest} tokens of prompt and answer ({setting})"),
            (len(rows) - len(room), f"are left out because the prompt has {longest - ROOM} tokens or more ({setting})"),
            (single, "are left out because they have one token"),
        )
        if count
    ]
    return f"of {len(rows)} answers {', '.join(said)}" if said else ""


def _has_room(row: Row, longest: int) -> bool:
    return len(row.prompt) < longest - ROOM


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


def one_in_many(row: Row) -> bool:
    """Whether a row is one of the drafters' held-out ones."""
    return int(row.key[:8], 16) % HELD_OUT == 0


def corpus(
    paths: Sequence[str],
    target: LoadedModel,
    longest: int,
    folder: Path,
    held_out: Callable[[Row], bool] = one_in_many,
) -> Corpus:
    """`corpus_of` the rows of `paths`. Raises `ConfigError` naming the field `data`, also if the files are unusable or
    hold answers of another model."""
    return corpus_of(answers_of(paths, target), target, longest, folder, held_out)


def answers_of(paths: Sequence[str], target: LoadedModel) -> list[Row]:
    """`whole_rows` of the target. Raises `ConfigError` as that does."""
    return whole_rows(paths, origin_of(target), target.tokenizer.eos_token_ids)


def corpus_of(
    rows: Sequence[Row], target: LoadedModel, longest: int, folder: Path, held_out: Callable[[Row], bool] = one_in_many
) -> Corpus:
    """The rows, made `fitting`, with the target's features, which are cached in `folder`.

    Raises `ConfigError` naming the field `data` for rows that cannot be used.
    """
    rows = fitting(rows, longest)
    parts = padded_tokens(rows, longest, target)
    apart = np.asarray([held_out(row) for row in rows])
    if apart.all() or not apart.any():
        raise ConfigError(
            f"data: {len({row.key for row in rows})} prompts are too few: some are held out at random, and neither "
            "part may be empty"
        )
    return _with_features(rows, parts, target, folder, apart)


def held_out_corpus(rows: Sequence[Row], target: LoadedModel, folder: Path) -> Corpus:
    """A corpus of whole rows with their features, all of them held out."""
    longest = max(len(row.prompt) + len(row.answer) for row in rows)
    return _with_features(rows, padded_tokens(rows, longest, target), target, folder, np.ones(len(rows), bool))


def _with_features(
    rows: Sequence[Row], parts: tuple[np.ndarray, ...], target: LoadedModel, folder: Path, held_out: np.ndarray
) -> Corpus:
    """`parts`: from `padded_tokens`."""
    tokens, start, length = parts
    ended = np.asarray([row.ended for row in rows])
    return Corpus(tokens, _features(tokens, length, target, folder), start, length, held_out, ended)


def padded_tokens(rows: Sequence[Row], longest: int, target: LoadedModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`tokens`, `start` and `length` of a `Corpus`. Raises `ConfigError` for tokens that the target does not have."""
    tokens = np.zeros((len(rows), longest), np.int32)
    start, length = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
    for i, row in enumerate(rows):
        start[i], length[i] = len(row.prompt), len(row.prompt) + len(row.answer)
        tokens[i, : length[i]] = row.prompt + row.answer
    if tokens.max() >= target.config.vocab_size:
        raise ConfigError(f"data: holds tokens outside the vocabulary of {target.name}")
    return tokens, start, length


def _features(tokens: np.ndarray, length: np.ndarray, target: LoadedModel, folder: Path) -> np.ndarray:
    """`[N, L, TAPS * hidden]` float16, memory-mapped from a file named by a digest of rows and target."""
    digest = hashlib.sha256(repr((target.name, tokens.shape, tapped_layers(target.config))).encode())
    norm = np.asarray(target.weights["norm"], np.float32)
    for part in (tokens, length, norm):  # the norm tells models of the same name apart
        digest.update(part.tobytes())
    path = folder / f"features-{digest.hexdigest()[:16]}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npy")  # an interrupted run must not leave a file that looks complete
        features = np.lib.format.open_memmap(partial, "w+", np.float16, (*tokens.shape, feature_width(target.config)))
        for row, found in each_features(tokens, length, target, np.float16):  # padding stays zero
            features[row, : len(found)] = found
        features.flush()
        partial.rename(path)
    return np.load(path, mmap_mode="r")


def each_features(
    tokens: np.ndarray, length: np.ndarray, target: LoadedModel, dtype: Any = np.float32
) -> Iterator[tuple[int, np.ndarray]]:
    """The features `[length of the row, TAPS * hidden]` of each row, with its index, in batches of similar length. They
    are computed in float32 and returned as `dtype`."""
    config = target.config.for_length(tokens.shape[1])
    model = Decoder(config, device_weights(config, target.weights, "float32"))
    run = jax.jit(jax.vmap(lambda model, t: target_features(model, t).astype(dtype), in_axes=(None, 0)))
    order, rows = np.argsort(length), _batch_rows(int(length.max()))
    batches = (order[i : i + rows] for i in range(0, len(order), rows))
    running = (
        (batch, run(model, jnp.asarray(tokens[np.resize(batch, rows), : padded(int(length[batch].max()))])))
        for batch in batches
    )
    with progress("target's features, rows", len(order)) as advance:
        for batch, out in one_ahead(running):
            for row, found in zip(batch.tolist(), np.asarray(out), strict=False):
                yield row, found[: length[row]]
                advance()


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """The items, each given after the next one was made: the device computes that one meanwhile."""
    made: deque[T] = deque()
    for item in items:
        made.append(item)
        if len(made) > 1:
            yield made.popleft()
    yield from made


def _batch_rows(longest: int) -> int:
    if jax.default_backend() == "cpu":
        return _ROWS
    return max(1, min(_GPU_ROWS, _GPU_SCORES // padded(longest) ** 2))


def padded(length: int) -> int:
    """The width of a batch with rows of up to `length` tokens."""
    multiple = _MULTIPLE if jax.default_backend() == "cpu" else _GPU_MULTIPLE
    return -(-length // multiple) * multiple
