"""SPIN's batch verification against a padded reference: the reference is right, pads, and is reported."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tiny
from jaxspec.bench import BenchError
from jaxspec.bench.papers import page
from jaxspec.bench.papers.spin import experiment as spin
from jaxspec.bench.papers.spin import requests as spin_requests
from jaxspec.bench.papers.spin import verification as spin_verification
from jaxspec.bench.papers.spin import verification_report as spin_verification_page
from jaxspec.bench.papers.spin.padded import PaddedLayers, widened
from jaxspec.bench.papers.spin.requests import Batch, Requests
from jaxspec.bench.papers.spin.steps import Shared, Steps, chain
from jaxspec.bench.papers.spin.verification_report import KV_PADDED, PACKED, PADDED
from jaxspec.kernels import cpu
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import SamplingInputs, Tree
from jaxspec.step.step import StepResult, split

PAGE, REQUESTS, PAGES, WIDTH = 16, 3, 6, 5
#: Tokens of the step that computes prompts, and of those that verify.
PROMPTS, QUERIES = 240, REQUESTS * WIDTH


@lru_cache
def shared() -> Shared:
    cpu.load()
    model = tiny.model()
    return Shared(model.config, split(NativeLayers().decoder(model.config, model.weights, "float32")), PAGE)


@lru_cache
def engine() -> Steps:
    """With more pages than the requests can have, so that they lie anywhere."""
    return Steps(shared(), NativeLayers(), (PROMPTS, QUERIES), REQUESTS, PAGES, 2 * REQUESTS * PAGES)


@lru_cache
def reference(way: str) -> Steps:
    return Steps(shared(), PaddedLayers(), (QUERIES,), REQUESTS, PAGES)


def draft_chain(text: list[int], nodes: int, rng: np.random.Generator) -> list[int]:
    """The next token, and drafts about half of which are the model's own."""
    tokens = [int(tiny.logits(text)[-1].argmax())]
    while len(tokens) < nodes:
        right = int(tiny.logits(text + tokens)[-1].argmax())
        tokens.append(right if rng.random() < 0.6 else int(rng.integers(256)))
    return tokens


def logged(trees: list[Tree]) -> list[Tree]:
    return [replace(tree, sampling=SamplingInputs(logprobs=True)) for tree in trees]


def verify(steps: Steps, trees: list[Tree], nodes: list[int]) -> tuple[np.ndarray, ...]:
    """Choices, their and the likeliest tokens' log-probabilities, and what is accepted, of every node that is no
    padding."""
    packed = steps.pack(logged(trees), QUERIES)
    result: StepResult = steps.run(packed)
    decision, logprobs = np.asarray(result.decision), jax.device_get(result.logprobs)
    real = np.concatenate([np.arange(first, first + n) for first, n in zip(packed.nodes, nodes, strict=True)])
    accepted = decision[QUERIES:].astype(bool)
    assert not np.delete(accepted[: packed.real_tokens], real).any(), "padding is accepted"
    return decision[real], logprobs.chosen[real], logprobs.top[real], accepted[real]


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 75), min_size=REQUESTS, max_size=REQUESTS),
    counts=st.lists(st.lists(st.integers(1, WIDTH), min_size=REQUESTS, max_size=REQUESTS), min_size=2, max_size=2),
    seed=st.integers(0, 2**32),
)
def test_the_reference_verifies_as_the_engine_does(lengths: list[int], counts: list[list[int]], seed: int) -> None:
    """Two steps in a row, so that what each committed is read."""
    rng = np.random.default_rng(seed)
    texts = [[int(t) for t in rng.integers(256, size=n)] for n in lengths]
    packed, ways = engine(), {way: reference(way) for way in (KV_PADDED, PADDED)}
    tables = rng.permutation(packed.room).astype(np.int32)[: REQUESTS * PAGES].reshape(REQUESTS, PAGES)
    packed.kv_cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), packed.kv_cache)
    prompts = [Tree.chain(t, 0, table, SamplingInputs()) for t, table in zip(texts, tables, strict=True)]
    jax.block_until_ready(packed.run(packed.pack(prompts, PROMPTS)))
    rows = np.arange(REQUESTS * PAGES, dtype=np.int32).reshape(REQUESTS, PAGES)
    there = (np.arange(PAGES * PAGE) < np.array(lengths)[:, None]).reshape(-1, PAGE)
    for steps in ways.values():
        keys, values = (np.asarray(own)[:, tables.reshape(-1)] for own in packed.kv_cache[:2])
        keys, values = np.where(there[:, None, None, :], keys, np.nan), np.where(there[:, None, :, None], values, 0)
        steps.kv_cache = steps.kv_cache._replace(keys=jnp.asarray(keys), values=jnp.asarray(values))
    for nodes in counts:
        drafts = [draft_chain(text, n, rng) for text, n in zip(texts, nodes, strict=True)]
        chains = lambda pages, drafts=drafts: [  # noqa: E731
            chain(*own) for own in zip(drafts, map(len, texts), pages, strict=True)
        ]
        expected = verify(packed, chains(tables), nodes)
        for way, steps in ways.items():
            trees = widened(chains(rows), WIDTH) if way == PADDED else chains(rows)
            found = verify(steps, trees, nodes)
            for own, other in zip(expected, found, strict=True):
                np.testing.assert_allclose(other, own, atol=2e-4, err_msg=way)
        starts = np.cumsum([0, *nodes[:-1]]).tolist()
        for text, tokens, start in zip(texts, drafts, starts, strict=True):
            choice, accepted = expected[0][start : start + len(tokens)], expected[3][start : start + len(tokens)]
            assert choice[0] == tiny.logits([*text, tokens[0]])[-1].argmax()
            text += [token for token, yes in zip(tokens, accepted.tolist(), strict=True) if yes]


def test_the_reference_computes_its_padding() -> None:
    """Were the padding numbers, they would count: the reference reads it, which the engine does not."""
    rng = np.random.default_rng(0)
    committed, nodes = [70, 9, 30], [2, 1, 3]
    rows = np.arange(REQUESTS * PAGES, dtype=np.int32).reshape(REQUESTS, PAGES)
    drafts = [rng.integers(256, size=n) for n in nodes]
    trees = [chain(*own) for own in zip(drafts, committed, rows, strict=True)]
    shape = (shared().config.num_layers, REQUESTS * PAGES, 2, 16, PAGE)
    keys, values = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))  # a page is square here
    there = (np.arange(PAGES * PAGE) < np.array(committed)[:, None]).reshape(-1, PAGE)
    found = {}
    for padding in (jnp.nan, 1.0):
        for name, steps in (("reference", reference(PADDED)), ("engine", engine())):
            more = ((0, 0), (0, steps.room - REQUESTS * PAGES), (0, 0), (0, 0), (0, 0))
            steps.kv_cache = steps.kv_cache._replace(
                keys=jnp.pad(jnp.where(there[:, None, None, :], keys, padding), more),
                values=jnp.pad(jnp.where(there[:, None, :, None], values, 0.0), more),
            )
            found[name, str(padding)] = verify(steps, trees, nodes)[1]
    np.testing.assert_allclose(found["reference", "nan"], found["engine", "nan"], atol=2e-4)
    np.testing.assert_array_equal(found["engine", "nan"], found["engine", "1.0"])
    first, *others = np.split(np.abs(found["reference", "1.0"] - found["engine", "nan"]), np.cumsum(nodes)[:-1])
    assert first.max() < 2e-4 and min(own.max() for own in others) > 1e-2


def test_padding_hangs_below_the_root() -> None:
    (tree,) = widened([chain([7, 8], 3, np.arange(2))], 4)
    assert tree.token.tolist() == [7, 8, -1, -1] and tree.subtree.tolist() == [4, 1, 1, 1]
    assert tree.parents().tolist() == [-1, 0, 0, 0] and tree.known.tolist() == [1, 0, 0, 0]
    assert len(tree.rows) == 4 and tree.committed == 3


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=8), more=st.integers(0, 20),
    unit=st.sampled_from([1, 4, 16]),
)  # fmt: skip
def test_the_search_finds_the_best_length(lengths: list[int], more: int, unit: int) -> None:
    width = len(lengths) + more
    found = spin_verification.best(np.array(lengths), width, unit)
    assert found.length % unit == 0 and found.rows <= width
    assert found.padded == found.rows * found.length - sum(lengths)
    for length in range(unit, max(lengths) + unit, unit):
        rows = sum(-(-n // length) for n in lengths)
        assert rows > width or found.padded <= rows * length - sum(lengths)


def test_a_search_for_too_few_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows are too few for 3 requests"):
        spin_verification.best(np.array([3, 4, 5]), 2)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_requests_are_met_by_how_long_they_write() -> None:
    table = Requests(np.array([10, 1000]), np.array([1, 9]), np.array([0.1, 0.9]))
    found = table.running(4000, np.random.default_rng(0))
    assert set(found.tolist()) == {10, *range(1000, 1009)}
    assert (found >= 1000).mean() == pytest.approx(0.9, abs=0.02)
    assert found[found >= 1000].mean() == pytest.approx(1004, abs=0.2)
    assert table.means() == pytest.approx({"count": 2, "prompt": 505, "answer": 5})


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_requests_of_files(tmp_path: Path) -> None:
    """The stand-in's tokens are bytes: [user] and [assistant] around a text of n make n + 18."""
    tokenizer: Any = tiny.model().tokenizer
    path = lines(
        tmp_path / "some.jsonl", {"turns": ["abc"], "reference": "12345"}, {"turns": ["abcd"]},
        {"turns": ["ab", "a", "b"], "replies": ["x" * 20, "yy"]}, {"turns": ["z" * 200]},
    )  # fmt: skip
    found = spin_requests.read(path, tokenizer, np.array([7]), 100, np.random.default_rng(0))
    one = lambda n: n + len("[user]\n[assistant]")  # noqa: E731
    assert found.prompt.tolist() == [one(3), one(4), one(2), one(2) + 20 + 1 + one(1)]
    assert found.answer.tolist() == [6, 7, 21, 3]
    assert found.share.sum() == pytest.approx(1) and (found.share * 37).tolist() == pytest.approx([6, 7, 21, 3])
    unknown = spin_requests.built_in(tokenizer, np.random.default_rng(0))
    assert unknown.answer.min() >= 1 and unknown.answer.max() <= spin_requests.UNKNOWN
    few = Requests(np.array([1]), np.array([10]), np.array([1.0]))
    both = spin_requests.mixed([found, few])  # as often each
    assert both.share[-1] == pytest.approx(10 / (37 / 4 + 10))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": []}, "line 1"),
        ({"turns": [3]}, "a list of texts"),
        ([1], "line 1"),
        ({"turns": ["z" * 99]}, "at most 50"),
    ],
)
def test_files_that_are_not_of_requests(row: Any, message: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "some.jsonl", row)
    with pytest.raises(ValueError, match=message):
        spin_requests.read(path, tiny.model().tokenizer, None, 50, np.random.default_rng(0))


# --- the whole of it --------------------------------------------------------------------------------------------------


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    page.add_files(parser, spin.FILES)
    spin.add_verification(parser)
    return argparse.Namespace(model=None, seed=0, repeats=2, **vars(parser.parse_args(words)))


@pytest.mark.slow
def test_it_measures_and_makes_a_page(tmp_path: Path) -> None:
    alpaca = lines(tmp_path / "alpaca.jsonl", *({"turns": ["a" * n], "reference": "b" * n} for n in range(5, 60, 5)))
    chat = lines(tmp_path / "chat.jsonl", *({"turns": ["a" * n]} for n in range(40, 50)))
    args = arguments(
        "--alpaca", alpaca, "--mixed", chat, "--batches", "3", "--drafts", "2", "--runs", "1", "--context", "310"
    )  # fmt: skip
    found = json.loads(json.dumps(spin_verification.verification(args, tiny.model())))
    assert set(found["points"]) == {"Alpaca", "mixed"} and found["requests"]["mixed"]["count"] == 21
    page = found["page_size"]
    for batches in (own["3"] for own in found["points"].values()):
        assert len(batches) == 2
        for batch in batches:
            committed, nodes = np.array(batch["committed"]), np.array(batch["nodes"])
            assert len(committed) == len(nodes) == 3 and set(nodes.tolist()) <= {1, 2, 3}
            assert set(batch["same_choices"].values()) == {1.0}
            assert min(batch["ms"].values()) > 0 and min(batch["temporaries"].values()) > 0
            longest = -(-committed.max() // 16) * 16
            assert batch["positions"][PACKED] == sum(-(-n // 16) * 16 for n in committed.tolist())
            assert batch["positions"][PADDED] == batch["positions"][KV_PADDED] == 3 * longest
            assert batch["values"][PACKED] == committed.sum() and batch["values"][PADDED] == 3 * committed.max()
            assert batch["tokens"][PADDED] == 3 * nodes.max() and batch["tokens"][PACKED] >= nodes.sum()
            a_position = 2 * 2 * 16 * 2 * 4  # layers, key heads, their size, keys and values, float32
            assert batch["kv_bytes"][PADDED] == 3 * (committed + nodes).max() * a_position
            assert batch["kv_bytes"][PACKED] == (-(-(committed + nodes) // page)).sum() * page * a_position
            assert batch["search"]["any"]["padded"] <= batch["search"]["lanes"]["padded"]
    sections = spin_verification_page.sections(found)
    assert len(sections) == 4
    for text in sections.values():
        widths = {line.count("|") for line in text.splitlines()}
        assert len(widths) == 1 and "| mixed, 3 |" in text
    spin_verification_page.draw(tmp_path, found)
    assert (tmp_path / "spin_verification.png").stat().st_size > 0


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none\.jsonl"):
        spin_verification.verification(arguments("--alpaca", str(tmp_path / "none.jsonl")), tiny.model())
    with pytest.raises(BenchError, match="sliding window"):
        spin_verification.verification(arguments(), tiny.model(window=8))


def test_a_batch_verifies_last_tokens_and_up_to_so_many_drafts() -> None:
    table = Requests(np.array([10]), np.array([5]), np.array([1.0]))
    batch = Batch.of(table, 200, 3, np.random.default_rng(0))
    assert set(batch.nodes.tolist()) == {1, 2, 3, 4} and batch.width == 4
    assert set(batch.committed.tolist()) == {10, 11, 12, 13, 14}
    assert batch.pages(4).tolist() == [-(-(c + n) // 4) for c, n in zip(batch.committed, batch.nodes, strict=True)]
