"""Prompts of simulated requests: which of their blocks are the same, so that prefixes can be shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts as block ids, as traces publish them instead of text: two prompts share a block where they have the same
    id, and a prefix where they share all blocks up to there.

    `blocks[i]`: ids of request i's blocks of `block_tokens` tokens each; its prompt ends within the last one. Raises
    `ValueError` for an id that is not from 0 to 2**32 - 2.
    """

    blocks: Sequence[Sequence[int]]
    block_tokens: int

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {self.block_tokens}")
        if any(not 0 <= block < 2**32 - 1 for blocks in self.blocks for block in blocks):
            raise ValueError("block ids must be from 0 to 2**32 - 2")

    def __len__(self) -> int:
        return len(self.blocks)

    def tokens(self, i: int, count: int) -> list[int]:
        """The `count` token ids of request i's prompt: for each block its id plus 1, as often as it has tokens. Answers
        are zeros, so no prompt contains another one's answer. Raises `ValueError` if its blocks are fewer."""
        tokens = [block + 1 for block in self.blocks[i] for _ in range(self.block_tokens)]
        if len(tokens) < count:
            raise ValueError(f"request {i} has {count} prompt tokens, but blocks for {len(tokens)}")
        del tokens[count:]
        return tokens


def shared(inputs: Sequence[int], groups: int, tokens: int, rng: np.random.Generator) -> tuple[np.ndarray, Prompts]:
    """Prompts that begin with one of `groups` shared prefixes of `tokens` tokens, such as system prompts or documents,
    followed by `inputs` tokens of their own. Returns the prompts' lengths `[requests]`, and the prompts.

    The k-th most popular prefix is chosen in proportion to 1 / k (Zipf). Raises `ValueError` for less than one group or
    token.
    """
    if groups < 1 or tokens < 1:
        raise ValueError(f"shared prefixes need at least one group and one token, got {groups} and {tokens}")
    weights = 1 / np.arange(1, groups + 1)
    chosen: list[int] = rng.choice(groups, len(inputs), p=weights / weights.sum()).tolist()
    own = groups  # ids after those of the prefixes
    blocks: list[tuple[int, ...]] = []
    for group, count in zip(chosen, inputs, strict=True):
        more = -(-count // tokens)
        blocks.append((group, *range(own, own + more)))
        own += more
    return np.asarray(inputs) + tokens, Prompts(blocks, tokens)
