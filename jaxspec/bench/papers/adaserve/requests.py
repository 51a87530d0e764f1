"""The requests of AdaServe's experiments (§6.1): three categories, each with its lengths and its TPOT SLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench.slo_mix import apportion
from jaxspec.sched.sim import json_lines
from jaxspec.sched.sim.arrivals import Arrival
from jaxspec.sched.sim.workload import CHARACTERS_PER_TOKEN, MAX_TOKENS, Lengths, Workload

#: The categories, and the shares that they have in Fig. 4 and 5.
NAMES = STRICT, MODERATE, RELAXED = "strict", "moderate", "relaxed"
MIX = (0.6, 0.2, 0.2)
#: Table 2: TPOT SLOs in seconds of moderate and relaxed requests. That of strict ones is the baseline latency.
TARGETS: Mapping[str, tuple[float, float]] = {
    "llama-2-7b": (0.03, 0.1), "llama-2-13b": (0.03, 0.1), "llama-2-70b": (0.06, 0.1),
}  # fmt: skip
#: `max_model_len`: Llama-2's context.
CONTEXT = 4096
#: Models of AlpacaEval whose answers have the lengths of the target's. It has none by Llama-2-70b-chat.
ANSWERS: Mapping[str, str] = {
    "llama-2-7b": "llama-2-7b-chat-hf", "llama-2-13b": "llama-2-13b-chat-hf", "llama-2-70b": "llama-2-13b-chat-hf",
}  # fmt: skip
#: The model of which the file has the answers' texts, not only their numbers of words.
_TEXTS = "llama-2-7b-chat-hf"


@dataclass(frozen=True, slots=True)
class Categories:
    """Each category's table of lengths and its TPOT SLO in seconds."""

    lengths: tuple[Lengths, Lengths, Lengths]
    targets: tuple[float, float, float]

    def workload(
        self, arrivals: Sequence[Arrival], shares: Sequence[float], rng: np.random.Generator
    ) -> tuple[Workload, np.ndarray]:
        """One request per arrival. Returns their categories `[requests]` too.

        The categories have exactly their shares, rounded, and each one's lengths are stratified, so that chance decides
        only which arrival gets which request. Only an oracle knows an answer's length: `max_tokens` is what the
        context leaves, at most `MAX_TOKENS`.
        """
        counts = apportion(shares, len(arrivals))
        kind = rng.permutation(np.repeat(np.arange(3), counts))
        length = np.zeros((2, len(arrivals)), int)
        for k, (table, count) in enumerate(zip(self.lengths, counts, strict=True)):
            rows = stratified(table, count, rng)
            length[:, kind == k] = table.input[rows], table.output[rows]
        most = np.minimum(MAX_TOKENS, CONTEXT - length[0])
        return Workload(
            np.array([a.time for a in arrivals]), length[0], length[1], np.full(len(arrivals), np.nan),
            np.asarray(self.targets)[kind], np.maximum(most, length[1]),
        ), kind  # fmt: skip


def stratified(table: Lengths, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` rows of the table `[count]` in random order: by total length, one from each of `count` equal parts."""
    by_length = np.argsort(table.input + table.output, kind="stable")
    places = (np.arange(count) + rng.random(count)) * len(table) / max(1, count)
    return rng.permutation(by_length[places.astype(int)])


def strict_share(share: float) -> tuple[float, float, float]:
    """Shares of the categories for a share of strict requests (Fig. 6); the other two get half of the rest each."""
    return share, (1 - share) / 2, (1 - share) / 2


def capped(table: Lengths, context: int) -> Lengths:
    """Lengths cut to the context: the output to at most half of it, the prompt to the rest."""
    output = np.minimum(table.output, context // 2)
    return Lengths(np.clip(table.input, 1, context - output), output, table.predicted)


def read_answers(path: str | Path, model: str) -> Lengths:
    """Lengths of AlpacaEval's prompts and of this model's answers, at four characters per token.

    The file has words for all models and texts for one, whose characters per word count for the others too. Raises
    OSError, or ValueError naming the line that is wrong.
    """

    def sizes(row: Any) -> tuple[int, int, int, int]:
        words = row["reference_words"]
        return len(row["turns"][0]), int(words[model]), len(row["other_references"][_TEXTS]), int(words[_TEXTS])

    rows = json_lines.read(path, sizes, f"prompt, or no answers of {model} and {_TEXTS}")
    prompts, words, characters, written = np.array(rows).reshape(-1, 4).T
    if not written.sum():
        raise ValueError(f"{path}: no answers of {_TEXTS}")
    per_word = characters.sum() / written.sum() / CHARACTERS_PER_TOKEN
    tokens = lambda sizes, factor: np.maximum(1, np.round(factor * sizes)).astype(int)  # noqa: E731
    return Lengths(tokens(prompts, 1 / CHARACTERS_PER_TOKEN), tokens(words, per_word), np.full(len(words), np.nan))
