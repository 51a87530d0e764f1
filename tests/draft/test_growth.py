"""Trees of a fixed shape: each node keeps its likeliest children, however unlikely its own path is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import tiny
from helpers.generation import GREEDY, check_clean, tokens_of
from helpers.tiny_drafters import perfect
from jaxspec.draft import registry as drafters
from jaxspec.draft.growth import Expansion, Growth
from jaxspec.draft.registry import runners
from jaxspec.sched.spec.trees.candidates import Draft
from jaxspec.sched.spec.trees.fixed import SPECINFER

NODES = [1, 1, 3, 3, 3, 3, 3, 3]
SIZES: dict[str, Any] = dict(
    page_size=16, max_num_seqs=3, token_buckets=[64], compilation_cache_dir="", kv_cache_tokens=2048,
    max_num_batched_tokens=64, max_model_len=128,
)  # fmt: skip
TEXTS = [[7, 8, 9, 7, 8], list(range(40)), [200, 1, 5]]


def grown(growth: Growth, levels: int, logits: np.ndarray) -> list[list[tuple[tuple[int, ...], float]]]:
    """Path and log-probability of each node, level by level. `logits` `[vocab, vocab]` depend on the parent's token."""
    batch: Any = SimpleNamespace()
    paths: list[tuple[int, ...]] = [()]
    path, out = jnp.zeros((1, 1)), []
    for level in range(levels):
        of_nodes = jnp.asarray(logits[[p[-1] if p else 0 for p in paths]])[None]
        new = growth.grow(of_nodes, path, jnp.int32(level), batch, jnp.zeros(1, jnp.int32))
        column, parent, path = (x[0] for x in new)
        paths = [(*paths[p], c) for p, c in zip(parent.tolist(), column.tolist(), strict=True)]
        out.append([(p, v) for p, v in zip(paths, path.tolist(), strict=True) if np.isfinite(v)])
        path = path[None]
    return out


def test_each_node_keeps_its_likeliest_children() -> None:
    rng, widths = np.random.default_rng(0), (2, 1, 3)
    logits = rng.normal(0, 3, (10, 10)).astype(np.float32)
    logprob = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    level = [((), 0.0)]
    for width, found in zip(widths, grown(Expansion(widths), 3, logits), strict=True):
        level = [
            ((*path, int(c)), value + logprob[path[-1] if path else 0, c])
            for path, value in level
            for c in np.argsort(-logprob[path[-1] if path else 0])[:width]
        ]
        assert [path for path, _ in found] == [path for path, _ in level]
        assert [value for _, value in found] == pytest.approx([value for _, value in level], abs=1e-4)
    with pytest.raises(ValueError, match="at least one wide"):
        Expansion((2, 0))


def drafts_of(llm: Any, max_tokens: int) -> list[Draft]:
    """The trees that were verified for `TEXTS`, after a check of the answers."""
    speculator, seen = llm.engine.speculator, list[Draft]()
    draft = speculator.draft

    def spy(*args: Any) -> dict[str, Draft]:
        out = draft(*args)
        seen.extend(out.values())
        return out

    speculator.draft = spy
    expected, before = [tiny.greedy(t, max_tokens) for t in TEXTS], llm.engine.stats().compilations_after_warmup
    out = llm.generate(TEXTS, GREEDY.__class__(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    assert [tokens_of(o) for o in out] == expected
    check_clean(llm)
    assert llm.engine.stats().compilations_after_warmup == before
    return seen


@pytest.mark.parametrize("depth", [None, 3])
@pytest.mark.slow
def test_specinfer_verifies_its_20_nodes(depth: int | None) -> None:
    with tiny.llm(draft="truncated:1", tree="fixed", draft_depth=depth, **SIZES) as llm:
        (runner,) = runners(llm.engine.speculator)
        assert runner.widths == [3], "only this shape is compiled"
        verified = [np.bincount(d.depth)[1:].tolist() for d in drafts_of(llm, 30)]
    whole = NODES[:depth]
    assert verified.count(whole) > 10
    assert all(v == whole[: len(v)] for v in verified), "the end of a request cuts whole levels only"


@pytest.mark.slow
def test_the_likeliest_path_of_a_perfect_drafter_is_accepted_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "load", lambda name, target: perfect(target))
    with tiny.llm(draft=["truncated:1"], tree="fixed", **SIZES) as llm:
        drafts_of(llm, 28)  # the first token, and three trees of eight levels with the bonus token
        stats = llm.engine.stats()
    assert stats.accepted_tokens == stats.verifications * len(SPECINFER) == 3 * 3 * 8


def test_ngram_lookup_proposes_a_chain_as_ever() -> None:
    with tiny.llm(draft="ngram", tree="fixed", **SIZES) as llm:
        verified = [np.bincount(d.depth)[1:].tolist() for d in drafts_of(llm, 30)]
    assert all(v == [1] * len(v) for v in verified)
