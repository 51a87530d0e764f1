"""Rejection sampling keeps the target's distribution: the rule by itself, and in the engine for chains and trees."""

from __future__ import annotations

from itertools import product
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from helpers import tiny
from helpers.candidate_trees import select
from helpers.fakes import ByteTokenizer, as_tokenizer
from jaxspec import LLM, SamplingParams
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.draft.growth import Draws
from jaxspec.models.decoder import Decoder, device_weights, forward
from jaxspec.models.load import LoadedModel
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.sampled import SampledTree
from jaxspec.step import rejection
from jaxspec.step import sampler as choose
from jaxspec.step.batch import BatchBuffers, BatchShape
from jaxspec.step.rejection import DraftDistributions

VOCAB, DRAWS = 12, 20_000
verify, exponential_race = jax.jit(rejection.verify), jax.jit(choose.exponential_race)
exponential_noise = jax.jit(choose.exponential_noise, static_argnums=2)


def fits(counts: np.ndarray, chances: np.ndarray) -> float:
    """p-value of the counts; rare cells are taken together, as the test wants it."""
    expected = counts.sum() * chances.astype(np.float64) / chances.sum(dtype=np.float64)
    if (rare := expected < 8).any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(scipy.stats.chisquare(counts, expected).pvalue)


def keys(count: int) -> np.ndarray:
    return np.random.default_rng(4).integers(-(2**31), 2**31, (count, 2)).astype(np.int32)


def test_where_what_is_left_of_the_drafter_is_too_small_for_a_float() -> None:
    """Drafter and target are both certain, of different tokens: the second draw must not be taken for granted."""
    shape = BatchShape(1, 1, 1, 1, 2)
    _, batch = BatchBuffers([shape]).take(shape)
    batch.children[:], batch.drawn_from[:] = [0, 1], 0
    drawn = DraftDistributions(jnp.asarray([[[[300.0, 100.0, 101.0, 50.0]]]]), jnp.arange(4))
    weights = jnp.asarray([[0.0, 1e-27, 1e-27, 1.0]])
    left, taken = verify(weights, jax.tree.map(jnp.asarray, batch), drawn)
    assert taken[0] == -1
    np.testing.assert_allclose(left[0], [0, 0, 0, 1], atol=1e-6)


@pytest.mark.parametrize("children", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_rule_by_itself(children: int) -> None:
    """One node a request, all of one p and one q, which knows only half of the tokens."""
    rng = np.random.default_rng(children)
    p = rng.dirichlet(np.full(VOCAB, 0.4)).astype(np.float32)
    vocab = np.asarray([0, 2, 3, 5, 7, 11], np.int32)
    logits = rng.normal(size=6).astype(np.float32) * 1.5
    shape = BatchShape(DRAWS, DRAWS, DRAWS, 1, children)
    _, batch = BatchBuffers([shape]).take(shape)
    batch.seed[:], batch.temperature[:] = keys(DRAWS), 1
    batch.logit_node[:], batch.position[:] = np.arange(DRAWS), 8
    batch = jax.tree.map(jnp.asarray, batch)
    levels = Draws((children,))
    position = jnp.full(DRAWS, 9)
    rows = jnp.broadcast_to(jnp.asarray(logits), (DRAWS, 1, 6))
    level = jax.jit(levels.grow)(rows, jnp.zeros((DRAWS, 1)), jnp.asarray(0), batch, position)
    q = np.exp(logits) / np.exp(logits).sum()
    first = np.asarray(level.column[:, 0])
    assert fits(np.bincount(first, minlength=6), q) > 1e-3
    np.testing.assert_allclose(level.logprob[:, 0], np.log(q)[first], atol=1e-5)
    tokens = vocab[np.asarray(level.column)]
    assert all(len(set(row)) == children for row in tokens.tolist())

    batch = batch._replace(children=jnp.asarray(tokens), drawn_from=jnp.arange(DRAWS))
    drawn = DraftDistributions(rows[:, None], jnp.asarray(vocab))
    left, taken = verify(jnp.broadcast_to(7 * p, (DRAWS, VOCAB)), batch, drawn)
    chex.assert_shape(left, (DRAWS, VOCAB))
    chex.assert_tree_all_finite(left)
    token = np.where(taken >= 0, taken, exponential_race(left, exponential_noise(batch.seed, position, VOCAB)))
    assert fits(np.bincount(token, minlength=VOCAB), p) > 1e-3
    share = float((taken >= 0).mean())
    if children == 1:  # Leviathan et al., Corollary 3.6: accepted with probability Σ min(p, q)
        assert share == pytest.approx(np.minimum(p[vocab], q).sum(), abs=4 / DRAWS**0.5)
    else:
        assert share > np.minimum(p[vocab], q).sum()
    # The test can fail: were the first child taken always, or the leftover drawn from p itself, it would.
    from_p = exponential_race(jnp.asarray(p)[None], jnp.ones((DRAWS, VOCAB)))
    assert fits(np.bincount(np.where(taken >= 0, taken, from_p), minlength=VOCAB), p) < 1e-6

    untouched, none = verify(jnp.asarray(p)[None], jax.tree.map(lambda x: x[:1], batch)._replace(
        drawn_from=jnp.full(1, -1)), drawn)  # fmt: skip
    np.testing.assert_allclose(untouched[0], p, rtol=1e-5)
    assert none[0] == -1


def test_draws_keep_the_order_and_the_shape_of_their_levels() -> None:
    draws = Draws((1, 3, 2))
    parent, rank = draws._places
    assert draws.width == 6
    assert [(p, r) for p, r in zip(parent[1], rank[1], strict=True) if r >= 0] == [(0, 0), (0, 1), (0, 2)]
    assert list(zip(parent[2], rank[2], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    with pytest.raises(ValueError, match="at least one wide"):
        Draws((1, 0))


def test_what_is_verified_does_not_depend_on_what_was_drawn() -> None:
    tree = Candidates(
        np.asarray([5, 1, 2, 0, 9], np.int32), np.asarray([-1, 0, 0, 0, 1], np.int32),
        np.asarray([-9, -10, -0.1, -np.inf, -11], np.float32),
    )  # fmt: skip
    assert [m.tolist() for m in select(SampledTree(8), [tree] * 3, [9, 2, 0], 99, [float("-inf")] * 3, 3)] == [
        [True, True, True, False, True], [True, True, False, False, False], [False] * 5,
    ]  # fmt: skip
    assert select(SampledTree(2), [tree], [9], 99, [float("-inf")], 1)[0].tolist() == [True, True, True, False, False]


def test_trees_picked_by_what_was_drawn_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"acceptance: rejection works with .* not equal_greedy"):
        EngineConfig.load(acceptance="rejection", tree="equal_greedy")


def small() -> LoadedModel:
    c = tiny.config(vocab_size=VOCAB, eos_token_ids=())
    weights = tiny.weights(c, seed=3)
    weights["embed"] /= 12  # flat distributions: many tokens to get wrong
    return LoadedModel(c, weights, as_tokenizer(ByteTokenizer()), "small")


def joint(target: LoadedModel, prompt: list[int], temperature: float) -> np.ndarray:
    """P(next three tokens) `[VOCAB ** 3]`, by plain forward passes."""
    model = Decoder(target.config, device_weights(target.config, target.weights, "float32"))
    texts = np.asarray([[*prompt, a, b] for a, b in product(range(VOCAB), repeat=2)], np.int32)
    logits = np.asarray(jax.vmap(lambda t: forward(model, t))(jnp.asarray(texts)))[:, len(prompt) - 1 :] / temperature
    p = np.asarray(jax.nn.softmax(logits)).reshape(VOCAB, VOCAB, 3, VOCAB)
    return np.einsum("a,ab,abc->abc", p[0, 0, 0], p[:, 0, 1], p[:, :, 2]).ravel()


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain", "fixed", "auto"])
def test_in_the_engine(tree: str) -> None:
    """Three tokens of thousands of requests, drafted by the target's first layer."""
    target, prompt, temperature, count = small(), [3, 1, 4, 1, 5], 1.3, 3000
    sizes: dict[str, Any] = dict(
        page_size=16, max_num_seqs=32, token_buckets=[32, 128, 288], max_num_batched_tokens=288, max_model_len=32,
        kv_cache_tokens=1024, compilation_cache_dir="", max_queued_requests=count,
    )  # fmt: skip
    with LLM(
        target, draft="truncated:1", compile_in_background=False, tree=tree, acceptance="rejection", **sizes
    ) as llm:
        params = [SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True, seed=s) for s in range(count)]
        out = llm.generate([prompt] * count, params)
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        both = llm.generate([prompt, prompt], [greedy, params[0]])  # a greedy request among sampled ones
        stats = llm.engine.stats()
    tokens = np.asarray([o.outputs[0].token_ids[:3] for o in out])
    counts = np.bincount(tokens @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3)
    assert fits(counts, joint(target, prompt, temperature)) > 1e-3
    assert fits(counts, joint(target, prompt, 1.0)) < 1e-6  # the test can fail
    assert stats.compilations_after_warmup == 0
    if tree != "auto":  # which may find that drafts don't pay
        assert stats.accepted_tokens / stats.verifications > 0.2
    expected = list(prompt)
    model = Decoder(target.config, device_weights(target.config, target.weights, "float32"))
    for _ in range(8):
        expected.append(int(np.asarray(forward(model, jnp.asarray(expected)))[-1].argmax()))
    assert both[0].outputs[0].token_ids == expected[len(prompt) :]
