"""Training drafters: how they begin, a run and its resumption, the file, the settings and the command."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from helpers import tiny
from helpers.distillation import LONGEST, TARGET, VOCAB, final_and_features, settings
from helpers.tiny_drafters import as_decoder
from jaxspec.config import ConfigError
from jaxspec.draft.distill.begin import begin, successors, vocabulary
from jaxspec.draft.distill.data import Corpus
from jaxspec.draft.distill.train import DEPTH, Batch, Trainer, loss_and_hits, plot
from jaxspec.errors import ModelLoadError
from jaxspec.models.drafter import DraftDecoder, draft_forward
from jaxspec.models.load.drafter_file import load_drafter, save_drafter
from jaxspec.train_predictor import curve

NORM = jnp.asarray(TARGET.weights["norm"])


@pytest.fixture(scope="module")
def finished(work: Path, text: Corpus) -> Trainer:
    """After all steps in one go, in `work/whole`."""
    trainer = Trainer(settings(), TARGET, text)
    trainer.run(work / "whole")
    return trainer


def states(model: DraftDecoder) -> dict[str, np.ndarray]:
    flat, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model))
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in flat}


def assert_same(one: DraftDecoder, other: DraftDecoder, rtol: float = 1e-7, atol: float = 0.0) -> None:
    chex.assert_trees_all_close(states(one), states(other), rtol=rtol, atol=atol)


# The baseline


def test_the_most_frequent_successor_is_the_baseline(text: Corpus) -> None:
    counts: dict[int, Counter[int]] = {}
    for i in np.flatnonzero(~text.held_out):
        for p in range(text.start[i], text.length[i]):
            counts.setdefault(int(text.tokens[i, p - 1]), Counter())[int(text.tokens[i, p])] += 1
    found = successors(text, VOCAB)
    chex.assert_shape(found, (VOCAB,))
    assert all(counts[token][found[token]] == max(counts[token].values()) for token in counts)
    total = sum(counts.values(), Counter())
    assert all(total[found[token]] == max(total.values()) for token in set(range(VOCAB)) - counts.keys())

    hits = []
    for i in np.flatnonzero(text.held_out)[:32]:
        tokens = text.tokens[i, : text.length[i]]
        final, _ = final_and_features(tokens)
        best = (final @ TARGET.weights["embed"].T).argmax(-1)
        hits.append((found[tokens] == best)[text.start[i] - 1 : text.length[i] - 1])
    runs = [sum(1 for _ in takewhile(bool, row[p : p + DEPTH])) for row in hits for p in range(len(row))]
    measured = Trainer(settings(), TARGET, text).evaluate()
    assert measured["bigram_hits"] == pytest.approx(np.concatenate(hits).mean(), abs=2e-3)  # features are float16
    assert measured["bigram_accepted_length"] == pytest.approx(1 + np.mean(runs), abs=2e-3)


# The drafter at the beginning


def test_the_vocabulary_is_of_frequent_tokens_and_the_end(text: Corpus) -> None:
    counts = np.zeros(VOCAB, int)
    for i in np.flatnonzero(~text.held_out):
        np.add.at(counts, text.tokens[i, text.start[i] : text.length[i]], 1)
    vocab = vocabulary(text, 20, TARGET.config.eos_token_ids, VOCAB)
    assert len(vocab) == 20 and set(TARGET.config.eos_token_ids) <= set(vocab)
    assert (np.diff(vocab) > 0).all()
    chosen = set(vocab) - set(TARGET.config.eos_token_ids)
    assert min(counts[list(chosen)]) >= max(counts[list(set(range(VOCAB)) - set(vocab))])
    assert vocabulary(text, 8192, (), VOCAB).tolist() == list(range(VOCAB))


@pytest.mark.parametrize(("which", "layer"), [("first", 0), ("last", 1)])
def test_a_drafter_begins_as_the_targets_layers(which: str, layer: int) -> None:
    vocab = np.asarray([1, 5, 256], np.int32)
    model = begin(settings(begin=which), TARGET, vocab)
    assert model.conditioned and model.config.num_layers == len(model.layers) == 1
    for part in ("attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down"):
        np.testing.assert_array_equal(getattr(model.layers[0], part)[...], TARGET.weights[f"layers.{layer}.{part}"])
    np.testing.assert_array_equal(model.norm[...], TARGET.weights["norm"])
    np.testing.assert_array_equal(model.embedding[...], TARGET.weights["embed"])
    np.testing.assert_array_equal(model.head[...], TARGET.weights["embed"].T[:, vocab])


def test_all_layers_make_the_target(text: Corpus) -> None:
    config = settings(layers=9, conditioned=False, vocabulary=8192)
    model = begin(config, TARGET, np.arange(VOCAB, dtype=np.int32))
    tokens = text.tokens[0, : text.length[0]]
    unread = jnp.full((len(tokens), TARGET.config.hidden_size), jnp.nan)
    final, _ = final_and_features(tokens)
    np.testing.assert_allclose(draft_forward(model, jnp.asarray(tokens), unread), final, rtol=1e-4, atol=1e-4)
    found = Trainer(config, TARGET, text).evaluate()
    assert min(found["hits"]) > 0.99
    lengths = (text.length - text.start)[text.held_out]  # so many positions have an answer's token next
    most = sum(min(DEPTH, n - i) for n in lengths for i in range(n)) / lengths.sum()
    assert found["accepted_length"] == pytest.approx(1 + most, abs=0.05)


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_drafter_continues_from_another(finished: Trainer, text: Corpus, layers: int, tmp_path: Path) -> None:
    """Layers that the other one lacks change nothing at first, but learn."""
    finished.export(path := tmp_path / "d.safetensors")
    batch = finished.batch(np.flatnonzero(text.held_out)[:4])
    config = settings(begin=str(path), layers=layers)
    model = begin(config, TARGET, finished.vocab)
    assert len(model.layers) == layers
    run = jax.jit(lambda model, batch: loss_and_hits(model, batch, NORM, 2, 0.5)[0])
    assert run(model, batch) == pytest.approx(float(run(finished.model, batch)), rel=2e-2)  # stored in INT8
    going_on = Trainer(config, TARGET, text)
    going_on.run(tmp_path)
    assert run(going_on.model, batch) < run(model, batch)
    assert all(np.abs(np.asarray(vars(layer)["down"][...])).max() > 0 for layer in going_on.model.layers)
    going_on.export(path)  # under the same name: not what that run began with
    with pytest.raises(ConfigError, match=r"work: .*begin: .*d\.safetensors \(\w+\) there, .* here"):
        Trainer(config, TARGET, text).run(tmp_path)


@pytest.mark.parametrize(("changes", "reason"), [(dict(layers=1), "2 layers"), (dict(conditioned=True), "plain")])
def test_a_drafter_of_another_kind_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    first = settings(conditioned=False, layers=2)
    vocab = np.arange(10, dtype=np.int32)
    save_drafter(begin(first, TARGET, vocab), "tiny", path := tmp_path / "d.safetensors")
    with pytest.raises(ConfigError, match=f"begin: .*{reason}"):
        begin(first.model_copy(update={"begin": str(path), **changes}), TARGET, vocab)
    with pytest.raises(ConfigError, match="begin: cannot read"):
        begin(settings(begin="none.safetensors"), TARGET, vocab)


# A run


def test_training_lowers_the_loss(finished: Trainer, text: Corpus) -> None:
    run = jax.jit(lambda model, batch: loss_and_hits(model, batch, NORM, 2, 0.5))
    batch = finished.batch(np.flatnonzero(text.held_out)[:4])
    before, (_, losses) = run(begin(finished.config, TARGET, finished.vocab), batch)
    after, (hits, _) = run(finished.model, batch)
    assert after < before - 0.1
    chex.assert_shape([losses, hits], (2,))
    chex.assert_tree_all_finite(nnx.state(finished.model))
    assert ((hits >= 0) & (hits <= 1)).all()


def test_only_the_drafters_own_weights_learn(finished: Trainer) -> None:
    before, after = states(begin(finished.config, TARGET, finished.vocab)), states(finished.model)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith(("layers.", "mix", "fuse", "norm"))}
    assert {name.partition(".")[0] for name in before.keys() - changed} == {"embedding", "head", "vocab"}
    fresh = tiny.weights(TARGET.config)
    chex.assert_trees_all_equal(dict(TARGET.weights), fresh)  # the target itself is not trained


def test_padding_and_the_prompt_do_not_count(finished: Trainer, text: Corpus) -> None:
    batch = finished.batch(np.asarray([3, 7]))
    assert int(finished.batch(np.asarray([3, 7]), prompts=True).use.sum()) == text.length[[3, 7]].sum() - 2
    chex.assert_shape([batch.tokens, batch.use], (4, LONGEST))
    for i, row in enumerate((3, 7)):
        wanted = np.zeros(LONGEST, bool)
        wanted[text.start[row] - 1 : text.length[row] - 1] = True
        np.testing.assert_array_equal(batch.use[i], wanted)
    assert not batch.use[2:].any()
    run = jax.jit(lambda model, batch: loss_and_hits(model, batch, NORM, 1, 1.0))
    other = jnp.where(jnp.arange(LONGEST) < text.length[[3, 7, 3, 7], None], batch.tokens, 9)
    assert run(finished.model, batch)[0] == pytest.approx(
        float(run(finished.model, Batch(other, batch.features, batch.use))[0])
    )


def test_an_epoch_has_every_row_once(finished: Trainer, text: Corpus) -> None:
    rows = np.flatnonzero(~text.held_out)
    count = -(-len(rows) // 4)
    first, second = (
        np.concatenate(list(islice(finished.groups(), i * count, (i + 1) * count))).tolist() for i in range(2)
    )
    assert sorted(first) == sorted(second) == rows.tolist()
    assert first != second


@pytest.mark.slow
def test_an_interrupted_run_continues_from_its_checkpoint(
    finished: Trainer, text: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Trainer(settings(), TARGET, text)
    update = stopped._update

    def stop_in_the_sixth_step(*args: Any) -> Any:
        if stopped.step == 5:
            raise KeyboardInterrupt
        return update(*args)

    monkeypatch.setattr(stopped, "_update", stop_in_the_sixth_step)
    with pytest.raises(KeyboardInterrupt):
        stopped.run(tmp_path)
    assert len(json.loads((tmp_path / "curve.json").read_text())) == 2
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())

    resumed = Trainer(settings(), TARGET, text)
    resumed.run(tmp_path)
    assert (resumed.step, resumed.tokens) == (finished.step, finished.tokens) == (8, finished.tokens)
    assert_same(resumed.model, finished.model, rtol=0, atol=0)
    assert [e["tokens"] for e in resumed.evaluations] == [e["tokens"] for e in finished.evaluations]
    assert resumed.evaluations[0] == stopped.evaluations[0]

    for change, said in (
        ({"layers": 2}, "layers: 1 there, 2 here"),
        ({"conditioned": False}, "conditioned: True there, False here"),
        ({"vocabulary": 32}, "vocabulary: 64 there, 32 here"),
        ({"steps": 16}, "steps: 8 there, 16 here"),
        ({"learning_rate": 1e-3}, "learning_rate: 0.003 there, 0.001 here"),
    ):
        with pytest.raises(ConfigError, match=f"work: .*checkpoints of a run with other settings.*{said}.*remove"):
            Trainer(settings(**change), TARGET, text).run(tmp_path)
    Trainer(settings(every=2), TARGET, text).run(tmp_path)  # how often to look changes nothing
    other = replace(TARGET, name="rand", weights={**TARGET.weights, "norm": TARGET.weights["norm"] * 2})
    with pytest.raises(ConfigError, match=r"target: tiny \(\w+\) there, rand \(\w+\) here"):
        Trainer(settings(), other, text).run(tmp_path)
    fewer = replace(text, **{name: getattr(text, name)[1:] for name in ("tokens", "features", "start", "length")})
    with pytest.raises(ConfigError, match=r"answers: \w+ there, \w+ here"):
        Trainer(settings(), TARGET, replace(fewer, held_out=text.held_out[1:])).run(tmp_path)


def test_checkpoints_that_do_not_say_of_which_run_are_refused(text: Corpus, tmp_path: Path) -> None:
    """As earlier versions wrote them; their arrays may be of any shape."""
    kinds = ocp.args.Composite(
        state=ocp.args.StandardSave({"a": np.zeros(3)}), log=ocp.args.JsonSave({"tokens": 1, "curve": []})
    )
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(4, args=kinds)
    with pytest.raises(ConfigError, match=r"work: .*checkpoints of an earlier version.*remove that folder") as caught:
        Trainer(settings(), TARGET, text).run(tmp_path)
    assert "\n" not in str(caught.value)


# The learning curve


def test_the_curve_is_written_and_drawn(finished: Trainer, work: Path) -> None:
    written = json.loads((work / "whole" / "curve.json").read_text())
    assert written == finished.evaluations
    assert [len(e["hits"]) for e in written] == [DEPTH] * 3
    assert 0 == written[0]["tokens"] < written[1]["tokens"] < written[2]["tokens"] == finished.tokens
    assert len({(e["bigram_hits"], e["bigram_accepted_length"]) for e in written}) == 1, "always the same rows"
    assert all(1 <= e["accepted_length"] <= 1 + DEPTH for e in written)
    assert (work / "whole" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_line_says_so(
    finished: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    curve._say_undrawn.cache_clear()
    for _ in range(2):
        curve.write(finished.evaluations, tmp_path, "tiny", plot)
    assert [path.name for path in tmp_path.iterdir()] == ["curve.json"]
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and '".[bench]"' in said


# The file


def test_a_drafter_comes_back_from_its_file(finished: Trainer, text: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "new" / "tiny.safetensors"
    finished.export(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with safe_open(path, "numpy") as file:
        assert {"embed", "head"}.isdisjoint(file.keys()), "the target has them"
    model = as_decoder(*load_drafter(path, TARGET.config, TARGET.weights))
    whole, stored = states(finished.model), states(model)
    for name, value in whole.items():
        if value.ndim == 2 and value.dtype == np.float32 and not name.startswith(("embedding", "head")):
            assert (np.abs(stored[name] - value) <= np.abs(value).max(0) / 253).all(), name
        else:
            np.testing.assert_array_equal(stored[name], value)
    n = text.length[0]
    tokens, features = jnp.asarray(text.tokens[0, :n]), jnp.asarray(text.features[0, :n], jnp.float32)
    got, wanted = (np.asarray(draft_forward(m, tokens, m.condition(features))) for m in (model, finished.model))
    assert np.corrcoef(got.ravel(), wanted.ravel())[0, 1] > 0.99  # random layers magnify errors


def test_a_file_that_does_not_fit_is_refused(finished: Trainer, tmp_path: Path) -> None:
    def load(path: Path, **changes: Any) -> None:
        load_drafter(path, replace(TARGET.config, **changes), TARGET.weights)

    missing, text, other, own = (tmp_path / name for name in ("none", "text", "other", "own"))
    text.write_text("not a safetensors file")
    save_file({"norm": np.ones(32, np.float32)}, other)
    finished.export(own)
    for path, words in ((missing, "cannot read"), (text, "cannot read"), (other, "not a drafter")):
        with pytest.raises(ModelLoadError, match=words) as error:
            load(path)
        assert str(path) in str(error.value)
    for change in ({"hidden_size": 64}, {"vocab_size": 300}):
        with pytest.raises(ModelLoadError, match=r"for tiny \(width 32, vocabulary 257\)"):
            load(own, **change)
    with pytest.raises(ModelLoadError, match=r"layers\.0\.gate_up"):
        load(own, intermediate_size=16)
