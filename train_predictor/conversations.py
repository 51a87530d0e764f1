"""Prompt files: conversations whose turns are asked one by one."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.models.load.tokenizer import Tokenizer
from jaxspec.train_predictor.answers import read_lines


class Key(NamedTuple):
    """Identifies a row of the output."""

    id: str
    temperature: float
    turn: int


@dataclass
class Conversation:
    """One conversation at one temperature.

    `replies` are the model's if `own`, added as they arrive, else the file's. `left` is set if a turn's prompt is too
    long, and gives its size; later turns are not asked then either.
    """

    id: str
    source: str
    temperature: float
    turns: list[str]
    replies: list[str]
    own: bool
    left: str | None = None

    @property
    def keys(self) -> list[Key]:
        return [Key(self.id, self.temperature, i) for i in range(len(self.turns))]

    def ids(self, tokenizer: Tokenizer, turn: int) -> list[int]:
        """Token ids of the prompt for a turn."""
        if not tokenizer.has_chat_template:
            spoken = [text for pair in zip(self.turns, self.replies, strict=False) for text in pair][: 2 * turn]
            return tokenizer.encode("\n".join([*spoken, self.turns[turn]]))
        messages = []
        for text, reply in zip(self.turns[:turn], self.replies[:turn], strict=True):
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        messages.append({"role": "user", "content": self.turns[turn]})
        return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def conversations(paths: Sequence[str], temperatures: Sequence[float], own: bool, seed: int) -> list[Conversation]:
    """Every conversation at every temperature, shuffled by `seed` and id, so that any prefix is a random sample.

    Raises `OSError`, and `ValueError` if a file holds no prompts, bad ones, or one twice.
    """
    out = [
        Conversation(id, source, t, turns, [] if own else replies, own)
        for path in paths
        for id, source, turns, replies in read_conversations(Path(path), own)
        for t in temperatures
    ]
    if not out:
        raise ValueError(f"no prompts in {', '.join(paths)}")
    (id, _), times = Counter((c.id, c.temperature) for c in out).most_common(1)[0]
    if times > 1:
        raise ValueError(f"two prompts have the id {id!r}, or a file or temperature was given twice")
    return sorted(out, key=lambda c: stable_hash(seed, "order", c.id, c.temperature))


def read_conversations(path: Path, own: bool) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """(id, source, user turns, replies) of each line. Unless the history is the model's `own` replies, turns without
    replies to all earlier turns are left out. Raises `OSError` and `ValueError`."""
    for i, row in enumerate(read_lines(path)):
        id, turns, replies = str(row.get("id", f"{path.stem}-{i}")), row.get("turns"), row.get("replies") or []
        if not (isinstance(turns, list) and turns and all(isinstance(t, str) for t in turns)):
            raise ValueError(f'{path}: prompt {id} has no "turns", a list of texts')
        if not (isinstance(replies, list) and all(isinstance(r, str) for r in replies)):
            raise ValueError(f'{path}: "replies" of prompt {id} must be a list of texts')
        yield id, str(row.get("dataset", path.stem)), turns if own else turns[: len(replies) + 1], replies


def stable_hash(*parts: Any) -> int:
    """A 60-bit hash that is the same in every process."""
    return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:15], 16)
