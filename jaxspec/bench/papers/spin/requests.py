"""Snapshots of a running service for the verification benchmark: the KV length of each running request.

Lengths are those of real texts with the model's tokenizer and chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.bench import prompts
from jaxspec.sched.sim import json_lines

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer

#: Maximal tokens of answers of unknown length.
UNKNOWN = 256


@dataclass(frozen=True, slots=True)
class Requests:
    """Tokens of prompts and answers, and the probability that a running request is this one; `[requests]` each."""

    prompt: np.ndarray
    answer: np.ndarray
    share: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt)

    def running(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Committed positions `[count]` of requests that decode at one moment: the prompt and a part of the answer.

        A request runs in proportion to its answer's length, and may be anywhere within it. Its last token is the root
        of the tree and not committed.
        """
        rows = rng.choice(len(self), size=count, p=self.share)
        return self.prompt[rows] + rng.integers(self.answer[rows])

    def means(self) -> dict[str, float]:
        """Number of requests, and mean lengths in tokens over arriving (not running) requests."""
        arrive = self.share / self.answer
        prompt, answer = (float(np.average(lengths, weights=arrive)) for lengths in (self.prompt, self.answer))
        return {"count": len(self), "prompt": prompt, "answer": answer}


@dataclass(frozen=True, slots=True)
class Batch:
    """Committed positions and tokens to verify of each request, both `[requests]`."""

    committed: np.ndarray
    nodes: np.ndarray

    @classmethod
    def of(cls, requests: Requests, size: int, drafts: int, rng: np.random.Generator) -> Batch:
        """A batch of `size` running requests, each with its last token and up to `drafts` drafts."""
        return cls(requests.running(size, rng), 1 + rng.integers(drafts + 1, size=size))

    @property
    def room(self) -> np.ndarray:
        """KV positions that each request may have after the step `[requests]`."""
        return self.committed + self.nodes

    @property
    def width(self) -> int:
        """Most tokens that any request verifies."""
        return int(self.nodes.max())

    def pages(self, page_size: int) -> np.ndarray:
        """Pages of each request `[requests]`."""
        return -(-self.room // page_size)


def mixed(parts: Sequence[Requests]) -> Requests:
    """Requests of several kinds that arrive equally often."""
    arrive = np.concatenate([np.full(len(part), 1 / len(part)) for part in parts])
    prompt, answer = (np.concatenate([getattr(part, name) for part in parts]) for name in ("prompt", "answer"))
    return _of(prompt, answer, arrive)


def built_in(tokenizer: Tokenizer, rng: np.random.Generator) -> Requests:
    """Requests from `jaxspec.bench.prompts`, with random answer lengths."""
    return _lengths([([text], None) for text in prompts.PROMPTS], tokenizer, None, rng)


def read(
    path: str | Path, tokenizer: Tokenizer, answers: np.ndarray | None, context: int, rng: np.random.Generator
) -> Requests:
    """Requests of a JSONL file: lines with a list `turns`, and either a text `reference` that answers the first turn,
    or a list `replies`; then every turn with a reply is a request whose prompt includes the earlier turns.

    Lengths of missing answers are drawn from `answers`. Requests longer than `context` tokens are left out. Raises
    OSError or ValueError.
    """
    rows = json_lines.read(path, lambda row: list(_conversations(row)))
    found = [request for row in rows for request in row]
    lengths = _lengths(found, tokenizer, answers, rng)
    kept = lengths.prompt + lengths.answer <= context
    if not kept.any():
        raise ValueError(f"{path}: no request of at most {context} tokens")
    return _of(lengths.prompt[kept], lengths.answer[kept], np.ones(int(kept.sum())))


def _of(prompt: np.ndarray, answer: np.ndarray, arrive: np.ndarray) -> Requests:
    share = arrive * answer
    return Requests(prompt, answer, share / share.sum())


def _conversations(row: dict[str, Any]) -> Iterator[tuple[list[str], str | None]]:
    """(alternating user and assistant texts, answer or None) of each request of a row."""
    turns, replies = row["turns"], row.get("replies")
    if not all(isinstance(text, str) for text in (*turns, *(replies or ()), row.get("reference") or "")):
        raise TypeError("turns, replies and reference must be texts")
    if replies is None:
        yield [turns[0]], row.get("reference")
        return
    history: list[str] = []
    for turn, reply in zip(turns, replies, strict=False):
        yield [*history, turn], reply
        history += [turn, reply]


def _lengths(
    found: Sequence[tuple[list[str], str | None]],
    tokenizer: Tokenizer,
    answers: np.ndarray | None,
    rng: np.random.Generator,
) -> Requests:
    prompt = np.array([_prompt_tokens(tokenizer, texts) for texts, _ in found])
    drawn = rng.integers(1, UNKNOWN + 1, len(found)) if answers is None else rng.choice(answers, len(found))
    answer = np.array(
        [
            # Plus the end token.
            len(tokenizer.encode(text, add_special_tokens=False)) + 1 if text else length
            for (_, text), length in zip(found, drawn.tolist(), strict=True)
        ]
    )
    return _of(prompt, answer, np.ones(len(found)))


def _prompt_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    if not tokenizer.has_chat_template:
        return len(tokenizer.encode("\n".join(texts)))
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return len(tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False))
