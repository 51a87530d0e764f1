"""Draft models with another vocabulary than the target's: token-level intersection (Timor et al. 2025, TLI).

The drafter reads and proposes the target's tokens. When it is loaded, its embedding is rearranged to be indexed by
them, and its head is cut to the tokens that both vocabularies have. So rounds, pages and watermarks are those of any
drafter, and the target verifies the drafts as always.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load import LoadedModel
from jaxspec.models.load.tokenizer import Tokenizer
from jaxspec.models.load.weights import LazyWeights, Weights, stored_of

#: Fewest tokens that both vocabularies must have: with fewer, nearly nothing could be drafted.
_FEWEST = 64


def cross_vocabulary(other: LoadedModel, weights: Weights, target: LoadedModel) -> tuple[DecoderConfig, Weights]:
    """A drafter for `target` of the model `other`, whose weights `weights` are a draft model's (`registry.whole`).

    Raises `ConfigError` if the vocabularies have too few tokens in common.
    """
    shared = shared_tokens(other.tokenizer, other.config, target.tokenizer, target.config)
    if len(shared) < _FEWEST:
        raise ConfigError(
            f"draft: {other.name} has only {len(shared)} tokens in common with {target.name}; {_FEWEST} are needed"
        )
    columns = np.fromiter(shared.values(), np.int64, len(shared))
    vocab = np.fromiter(shared, np.int32, len(shared))
    rows = _rows_to_read(
        other.tokenizer, other.config.vocab_size, target.tokenizer, target.config.vocab_size, shared
    )  # fmt: skip
    readers = {name: (lambda name=name: weights[name]) for name in weights if name not in ("embed", "head", "vocab")}
    readers |= {
        "embed": lambda: np.asarray(weights["embed"])[rows],
        "head": lambda: np.asarray(weights["head"])[:, columns],
        "vocab": lambda: vocab,
    }
    stored = dict(stored_of(weights))
    for name, index in (("embed", rows), ("head", columns)):
        if name in stored:
            (part,) = stored[name]
            stored[name] = [part.rows(index)]
    return replace(other.config, vocab_size=target.config.vocab_size), LazyWeights(readers, stored)


def shared_tokens(
    drafter: Tokenizer, drafters: DecoderConfig, target: Tokenizer, targets: DecoderConfig
) -> dict[int, int]:
    """The target's tokens that the drafter's vocabulary has too -> the drafter's, ascending.

    Tokens are equal if their bytes are. Special tokens have no bytes of their own: only end tokens correspond, the
    first to the first.
    """
    of_bytes: dict[bytes, int] = {}
    for id in range(min(drafter.vocab_size, drafters.vocab_size)):
        if id not in drafter.special_ids and (raw := drafter.token_bytes(id)):
            of_bytes.setdefault(raw, id)
    out = {
        id: of_bytes[raw]
        for id in range(min(target.vocab_size, targets.vocab_size))
        if id not in target.special_ids and (raw := target.token_bytes(id)) in of_bytes
    }
    ends = zip(target.eos_token_ids[:1], drafter.eos_token_ids[:1], strict=False)
    out |= {t: d for t, d in ends if t < targets.vocab_size and d < drafters.vocab_size}
    return dict(sorted(out.items()))


def _rows_to_read(drafter: Tokenizer, size: int, target: Tokenizer, vocab: int, shared: dict[int, int]) -> np.ndarray:
    """The drafter's token, of `size`, to read for each of the target's tokens `[vocab]`.

    One that it does not have is read as the last of the tokens that the drafter splits it into.
    """
    rows = np.zeros(vocab, np.int64)
    for id in range(min(target.vocab_size, vocab)):
        if id in shared:
            rows[id] = shared[id]
        elif split := drafter.encode(target.token_text(id), add_special_tokens=False):
            rows[id] = split[-1] if split[-1] < size else 0
    return rows
