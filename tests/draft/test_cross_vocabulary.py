"""A draft model with another vocabulary: the target's very tokens, drafted wherever both vocabularies have them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from helpers import tiny
from helpers.fakes import ByteTokenizer, as_tokenizer
from helpers.generation import GREEDY, check_clean, tokens_of
from jaxspec.config import ConfigError
from jaxspec.draft import registry
from jaxspec.draft.cross_vocabulary import cross_vocabulary, shared_tokens
from jaxspec.models.load import LoadedModel
from jaxspec.models.load.loaded import LoadedModel as Loaded
from jaxspec.models.load.stored import StoredMatrix
from jaxspec.models.load.weights import LazyWeights, readers_of, stored_of

#: Prompts whose answers have only tokens that both vocabularies have.
TEXTS, COUNT = [[1, 2, 7, 65], [9, 4, 7]], 24
COMMON = {token for text in TEXTS for token in text + tiny.greedy(text, COUNT)}
#: Bytes that the other tokenizer lacks. It has the rest in another order, then pairs of bytes, then an end token.
LOST, PAIRS = [byte for byte in range(256) if byte not in COMMON][:40], [b"ab", b"\xff\xfe"]
ORDER = np.random.default_rng(3).permutation([byte for byte in range(256) if byte not in LOST])


class OtherTokenizer(ByteTokenizer):
    """`ORDER`'s bytes, then `PAIRS`, then the end token."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = [bytes([b]) for b in ORDER] + PAIRS + [b"</s>"]
        self.end_id = len(self._bytes) - 1
        self.eos_token_ids, self.special_ids = (self.end_id,), frozenset({self.end_id})
        self.vocab_size = len(self._bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self._bytes.index(bytes([b])) for b in text.encode() if bytes([b]) in self._bytes]


@cache
def other() -> LoadedModel:
    """The target itself, with the other vocabulary."""
    target = tiny.model()
    tokenizer = OtherTokenizer()
    of_target = np.asarray([*ORDER, 1, 2, 256])
    weights = {**target.weights, "embed": np.asarray(target.weights["embed"])[of_target]}
    config = replace(target.config, vocab_size=tokenizer.vocab_size, eos_token_ids=(tokenizer.end_id,))
    return Loaded(config, weights, as_tokenizer(tokenizer), "other")


def test_tokens_correspond_by_their_bytes() -> None:
    target = tiny.model()
    shared = shared_tokens(other().tokenizer, other().config, target.tokenizer, target.config)
    assert list(shared) == sorted(shared) and len(shared) == 256 - len(LOST) + 1
    assert shared.pop(256) == other().config.vocab_size - 1  # the end tokens
    assert all(ORDER[there] == here for here, there in shared.items())


def test_weights_are_those_of_the_targets_tokens() -> None:
    target = tiny.model()
    config, weights = cross_vocabulary(other(), registry.whole(other()), target)
    vocab = weights["vocab"]
    assert config.vocab_size == target.config.vocab_size and (np.diff(vocab) > 0).all()
    np.testing.assert_array_equal(weights["head"], np.asarray(target.weights["embed"]).T[:, vocab])
    np.testing.assert_array_equal(weights["embed"][vocab], np.asarray(target.weights["embed"])[vocab])
    assert weights["embed"].shape == target.weights["embed"].shape
    np.testing.assert_array_equal(weights["layers.0.qkv"], target.weights["layers.0.qkv"])


def test_stored_matrices_are_rearranged_as_they_are() -> None:
    """As the native kernels take them: rows of the embedding and of the head, without float32 copies."""
    target, whole = tiny.model(), registry.whole(other())
    stored = StoredMatrix.of(np.asarray(whole["embed"], np.float32))
    lazy = LazyWeights(readers_of(whole), {"embed": [stored], "head": [stored]})
    _, weights = cross_vocabulary(other(), lazy, target)
    for name, wanted in (("embed", weights["embed"]), ("head", weights["head"].T)):
        (part,) = stored_of(weights)[name]
        assert part.shape == wanted.shape
        np.testing.assert_array_equal(part.floats(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "xla"])
def test_the_engine_drafts_what_both_vocabularies_have(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter is the target itself, so it is right wherever it knows all tokens."""
    monkeypatch.setattr(registry, "load_model", lambda name: other())
    sizes: dict[str, Any] = dict(page_size=16, max_num_seqs=4, token_buckets=[1, 16], compilation_cache_dir="")
    sizes |= dict(kv_cache_tokens=1024, max_num_batched_tokens=16, max_model_len=128, kernels=kernels)
    with tiny.llm(draft="other", tree="chain", draft_depth=3, **sizes) as llm:
        for texts in (TEXTS, [LOST[:5], [LOST[7], 3]]):
            out = llm.generate(texts, replace(GREEDY, max_tokens=COUNT))
            assert [tokens_of(o) for o in out] == [tiny.greedy(t, COUNT) for t in texts]
            if texts is TEXTS:
                stats = llm.engine.stats()
                assert stats.accepted_tokens == stats.draft_tokens > 20
        check_clean(llm)


def test_vocabularies_with_nearly_nothing_in_common_are_refused() -> None:
    target = tiny.model()
    few = replace(other(), config=replace(other().config, vocab_size=20))
    with pytest.raises(ConfigError, match="draft: other has only 20 tokens in common with tiny; 64 are needed"):
        cross_vocabulary(few, registry.whole(few), target)
