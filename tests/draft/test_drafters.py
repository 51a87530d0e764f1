"""Speculation in the engine: whatever the drafter, the tree and the pool, a request writes what it writes without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tiny
from helpers.generation import GREEDY, check_clean, params, prompts, tokens_of
from helpers.tiny_drafters import as_decoder, conditioned, perfect
from jaxspec import LLM
from jaxspec.config import ConfigError
from jaxspec.draft import registry as drafters
from jaxspec.draft.growth import Beam
from jaxspec.draft.runner import DraftRunner
from jaxspec.kernels import cpu
from jaxspec.models.decoder import Decoder, device_weights
from jaxspec.models.drafter import draft_forward, feature_width, target_features
from jaxspec.models.load.weights import of_target
from jaxspec.step.ahead import NewTokens
from jaxspec.step.batch import BatchShape
from jaxspec.step.gpu import GpuLayers
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import SamplingInputs, Tree
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.warmup import WarmUp
from jaxspec.step.xla import XlaLayers

COMMON: dict[str, Any] = dict(page_size=16, max_num_seqs=4, token_buckets=[16], compilation_cache_dir="")
ROOMY: dict[str, Any] = dict(kv_cache_tokens=2048, max_num_batched_tokens=16, max_model_len=128)
TIGHT: dict[str, Any] = dict(kv_cache_tokens=80, max_num_batched_tokens=8, max_model_len=72)


#: name -> (what replaces the drafter's weights, settings)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ngram": (None, dict(draft="ngram")),
    "suffix": (None, dict(draft=["suffix", "truncated:1"])),
    "truncated, fixed tree": (None, dict(draft="truncated:1", tree="fixed")),
    "perfect, chain": (perfect, dict(draft="truncated:1", tree="chain", draft_depth=4)),
    "perfect, by speed": (perfect, dict(draft="truncated:1")),
    "side by side": (conditioned, dict(draft=["ngram", "truncated:1"])),
    "conditioned, greedy tree": (conditioned, dict(draft="truncated:1", tree="global_greedy", draft_nodes=9)),
    "adaserve": (conditioned, dict(draft="truncated:1", tree="adaserve", slo={"tpot_ms": 0.01}, pace="stta")),
    "adaserve, all of the budget": (
        perfect,
        dict(
            draft="truncated:1",
            tree="adaserve",
            adaserve={"economic": False, "max_nodes": 3},
            verify_budget=12,
            slo={"tpot_ms": 3.0},
            pace="deadline",
        ),
    ),
}


def start(kind: str, **sizes: Any) -> LLM:
    """An engine of this kind; `sizes` replace `COMMON`."""
    other, settings_ = KINDS[kind]
    with pytest.MonkeyPatch.context() as patch:
        if other is not None:
            patch.setattr(drafters, "load", lambda name, target: other(target))
        return tiny.llm(**COMMON | sizes | settings_)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with tiny.llm(draft=[], **COMMON, **ROOMY) as llm:
        yield llm


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLM]]:
    with ExitStack() as stack:
        yield {kind: stack.enter_context(start(kind, **sizes)) for kind, sizes in zip(KINDS, [ROOMY, TIGHT] * 5)}  # noqa: B905


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_drafting_changes_no_token(plain: LLM, engines: dict[str, LLM], data: Any) -> None:
    texts = [t[:40] for t in data.draw(st.lists(prompts, min_size=1, max_size=5))]
    each = [data.draw(params) for _ in texts]
    expected = [tokens_of(o) for o in plain.generate(texts, each)]
    for llm in engines.values():
        assert [tokens_of(o) for o in llm.generate(texts, each)] == expected
        check_clean(llm)


@pytest.mark.slow
def test_what_ends_a_request_ends_it_inside_a_draft(plain: LLM, engines: dict[str, LLM]) -> None:
    text = list(range(30, 45))
    written = tiny.greedy(text, 12)
    stops = GREEDY.__class__(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[written[5]], logprobs=2)
    for n in (1, 2, 3, 7, 12):
        for llm in (plain, *engines.values()):
            short = GREEDY.__class__(temperature=0, max_tokens=n, ignore_eos=True)
            assert tokens_of(llm.generate([text], short)[0]) == written[:n]
    reference = plain.generate([text], stops)[0].outputs[0]
    for llm in engines.values():
        got = llm.generate([text], stops)[0].outputs[0]
        assert (got.token_ids, got.finish_reason, got.stop_reason) == (
            reference.token_ids, reference.finish_reason, reference.stop_reason
        )  # fmt: skip
        assert [p.token_id for p in got.logprobs or []] == got.token_ids
        np.testing.assert_allclose(
            [p.logprob for p in got.logprobs or []], [p.logprob for p in reference.logprobs or []], atol=1e-4
        )


@pytest.mark.slow
def test_a_perfect_drafter_is_always_right_and_nothing_compiles(engines: dict[str, LLM]) -> None:
    texts = [[i, 2 * i, 7] for i in range(3)]
    expected = [tiny.greedy(t, 21) for t in texts]
    llm = engines["perfect, chain"]
    before = llm.engine.stats()
    out = llm.generate(texts, GREEDY.__class__(temperature=0, max_tokens=21, ignore_eos=True))
    after = llm.engine.stats()
    assert [tokens_of(o) for o in out] == expected
    assert after.compilations_after_warmup == before.compilations_after_warmup
    proposed, accepted = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
    assert proposed == accepted > 0
    assert out[0].metrics.speculation.mean_accepted_length > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("conditioned, greedy tree", "bfloat16"), ("perfect, chain", "float16"), ("side by side", "bfloat16")],
)
def test_half_precision_drafts_change_no_token_of_the_same_precision_without_drafts(kind: str, dtype: str) -> None:
    """Every drafter starts in half precision, and its drafts are accepted by the target in half precision."""
    sizes = COMMON | ROOMY | dict(dtype=dtype, max_num_seqs=2, max_num_batched_tokens=8, token_buckets=[8])
    texts, sampling = [[i, 2 * i, 7] for i in range(3)], GREEDY.__class__(temperature=0, max_tokens=16, ignore_eos=True)
    with tiny.llm(draft=[], **sizes) as alone, start(kind, **sizes) as llm:
        expected = [tokens_of(o) for o in alone.generate(texts, sampling)]
        assert [tokens_of(o) for o in llm.generate(texts, sampling)] == expected
        assert llm.engine.stats().draft_tokens > 0
        check_clean(llm)


@pytest.mark.parametrize("layers", [NativeLayers(), XlaLayers()], ids=["native", "xla"])
def test_a_drafter_shares_the_targets_embedding(layers: NativeLayers | XlaLayers) -> None:
    """A truncated one also the head. One whose weights merely have the same names keeps its own."""
    cpu.load()
    target = tiny.model()
    decoder = layers.decoder(target.config, target.weights, "float32")
    ends = {"embed": decoder.embedding.get_value(), "head": decoder.head.get_value()}
    config, weights = drafters.truncated(target, 1)
    copies = {name: np.array(weight) for name, weight in weights.items()}
    for names, own in ((ends.keys(), weights), (set(), copies)):
        shared = {name: ends[name] for name in of_target(own)}
        model = layers.drafter(config, own, "float32", shared)
        found = {"embed": model.embedding.get_value(), "head": model.head.get_value()}
        assert {n for n in ends if found[n].unsafe_buffer_pointer() == ends[n].unsafe_buffer_pointer()} == set(names)


@pytest.mark.parametrize("kind", [*(pytest.param(k, marks=pytest.mark.slow) for k in ("xla", "gpu")), "native"])
@pytest.mark.parametrize("reads_features", [True, False])
def test_beam_against_the_plain_forward_pass(kind: str, reads_features: bool) -> None:
    """Catch-up in two rounds for two requests; tokens and probabilities of three levels against whole passes."""
    cpu.load()
    target = tiny.model()
    config, weights = conditioned(target) if reads_features else drafters.truncated(target, 1)
    layers = {"xla": XlaLayers(), "native": NativeLayers(), "gpu": GpuLayers(interpret=True)}[kind]
    model = as_decoder(config, weights)
    decoder = Decoder(target.config, device_weights(target.config, target.weights, "float32"))
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 256, n).tolist() for n in (23, 9)]
    pages = [np.asarray([5, 2], np.int32), np.asarray([7], np.int32)]
    truth = [np.asarray(jax.jit(target_features)(decoder, jnp.asarray(t))) for t in texts]
    mixed = [np.asarray(model.condition(jnp.asarray(t))) for t in truth]
    drafted = jax.jit(draft_forward)
    kv_cache = np.full((8, 16, feature_width(config)), np.nan, np.float32)
    for feature, own in zip(truth, pages, strict=True):
        for i, row in enumerate(feature[:-1]):  # the last token's is not known before the target has seen it
            kv_cache[own[i // 16], i % 16] = row
    whole = layers.decoder(target.config, target.weights, "float32")
    ends = {"embed": whole.embedding.get_value(), "head": whole.head.get_value()}
    shared: Any = SimpleNamespace(
        features=jnp.asarray(kv_cache), drawn=DraftDistributions.empty(), ends=ends, nothing_before=NewTokens.none(4)
    )
    runner = DraftRunner("d", config, weights, shared, layers, [BatchShape(32, 2, 2, 4)], 8, 16, "float32", [Beam(4)])
    needed, more = runner.jobs()
    WarmUp().compile_now("", [*needed, *more])
    runner.profile.guess()
    runner.start([Tree.chain(texts[0][:10], 0, pages[0], SamplingInputs())], 0, 1)
    chains = [
        Tree.chain(texts[0][10:], 10, pages[0], SamplingInputs()),
        Tree.chain(texts[1], 0, pages[1], SamplingInputs()),
    ]
    for text, condition, got in zip(texts, mixed, runner.start(chains, 3, 4)(), strict=True):
        assert len(got) == 12 and (np.diff(got.logprob.reshape(3, 4)) <= 0).all()
        for node in range(12):
            path, above = [], node
            while above >= 0:
                path.insert(0, above)
                above = int(got.parent[above])
            words, known, expected = list(text), condition[: len(text) - 1], 0.0
            for step in path:
                n = len(words)
                tokens, conditions = np.zeros(32, np.int32), np.zeros((32, known.shape[1]), np.float32)
                tokens[:n], conditions[: n - 1] = words, known
                own = np.asarray(drafted(model, tokens, conditions))[:n]  # what comes later changes nothing before it
                logits = own[-1] @ weights["head"]
                place = int(np.flatnonzero(weights["vocab"] == got.token[step])[0])
                expected += float(logits[place] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
                if step == path[0] and node == 0:
                    assert place == logits.argmax()
                words, known = [*words, int(got.token[step])], np.concatenate([known, own[-1:]])
            assert got.logprob[node] == pytest.approx(expected, abs=1e-3)


def test_auto_is_free_drafting_and_what_is_shipped_for_the_model(caplog: pytest.LogCaptureFixture) -> None:
    target, both = tiny.model(), {"grammar": None, "suffix": None}
    assert drafters.load_all(["auto"], target) == drafters.load_all(["suffix", "auto"], target) == both
    assert list(drafters.load_all(["truncated:1", "auto"], target)) == ["grammar", "truncated:1", "suffix"]
    assert set(drafters.DEFAULT.values()) <= set(drafters.shipped())
    # A model of other sizes by the name of one that has a drafter: it is served, without.
    assert drafters.load_all(["auto"], replace(target, name="smollm2-135m")) == both
    assert "drafting without smollm2-eagle" in caplog.text


def test_rejection_wants_one_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "load", lambda name, target: perfect(target))
    with pytest.raises(ConfigError, match="draft: acceptance: rejection works with one draft model"):
        tiny.llm(draft=["one", "two"], acceptance="rejection", **COMMON, **ROOMY)


def test_drafters_that_do_not_fit_are_refused() -> None:
    for draft, reason in (
        ("truncated:2", "between 1 and 1 layers"),
        ("nothing-like-it", "no model"),
        ("x.safetensors", "read"),
    ):
        with pytest.raises(ConfigError, match=f"draft: .*{reason}"):
            tiny.llm(draft=draft, **COMMON)
