"""Training length predictors: both phases, every formulation, resumption, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import prompts_with_lengths as texts
from jaxspec.config import ConfigError
from jaxspec.train_predictor import __main__ as command
from jaxspec.train_predictor import train
from jaxspec.train_predictor.checkpoints import digest
from jaxspec.train_predictor.config import PredictorConfig
from jaxspec.train_predictor.data import TEST, TRAIN, Corpus
from jaxspec.train_predictor.evaluate import rounded
from jaxspec.train_predictor.train import Trainer, pieces, width_of

pytestmark = pytest.mark.slow  # nearly every test compiles a training step

#: A whole run, short.
RUN: dict[str, Any] = dict(
    data=["unread"], work="unread", out="unread.safetensors", longest=32, width=16, batch=16, steps=160,
    learning_rate=1e-2, warmup=4, head_steps=160, head_learning_rate=1e-2, every=80, patience=20, dropout=0.1,
)  # fmt: skip


def settings(**changes: Any) -> PredictorConfig:
    return PredictorConfig(**{**RUN, **changes})


@pytest.fixture(scope="module")
def data() -> Corpus:
    return texts.made(texts.rows(240))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predictor")


@pytest.fixture(scope="module")
def finished(work: Path, data: Corpus) -> Trainer:
    """After both phases in one go, in `work/whole`."""
    trainer = Trainer(settings(), texts.encoder(), data)
    trainer.run(work / "whole")
    return trainer


def flat(tree: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


# A run


def test_training_lowers_the_loss_and_orders_the_prompts(finished: Trainer, work: Path) -> None:
    first, *_, last = finished.evaluations
    assert last["validation"] < 0.5 * first["validation"]
    report = json.loads((work / "whole" / "report.json").read_text())
    constant = report.pop("baseline")
    assert report == rounded(finished.report())
    assert constant == rounded(finished.constant(TEST))
    assert constant["tau"] == 0 and constant["mae"] > report["mae"] and constant["accuracy"] < report["accuracy"]
    assert report["tau"] > 0.6 and report["accuracy"] > 0.5 and report["error_ratio"] < 0.5
    assert report["capped"] > 0 and report["rows"] == len(finished.data.rows(TEST))
    assert finished.at[:3] == (3, 0, 320)
    assert [e["phase"] for e in finished.evaluations] == [1, 1, 1, 2, 2]
    assert json.loads((work / "whole" / "curve.json").read_text()) == finished.evaluations
    assert (work / "whole" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_weights_are_the_result(finished: Trainer) -> None:
    rows = finished.data.rows(1)
    raw = jnp.asarray(finished.raw(rows))
    length = jnp.asarray(finished.data.length[rows], jnp.float32)
    loss = finished.formulation.loss(raw, length, jnp.ones(len(rows)), jnp.asarray(finished.data.capped[rows]))
    assert float(loss) == pytest.approx(finished.at.best, rel=1e-5)
    assert finished.at.best == pytest.approx(min(e["validation"] for e in finished.evaluations), abs=1e-4)


@pytest.mark.parametrize("name", ["reg_mse", "cls", "ord_mse", "ord_l1", "binary", "pairwise", "survival"])
def test_every_formulation_trains(name: str, data: Corpus, tmp_path: Path) -> None:
    trainer = Trainer(settings(formulation=name, head_steps=80), texts.encoder(), data)
    found = trainer.run(tmp_path)
    assert found["tau"] > 0.4
    assert trainer.evaluations[-1]["validation"] < trainer.evaluations[0]["validation"]


def test_frozen_embeddings_stay_and_the_second_phase_moves_only_the_head(data: Corpus, tmp_path: Path) -> None:
    loaded = texts.encoder(layers=2)
    before = flat(jax.tree.map(jnp.copy, train.nnx.state(loaded.encoder)))
    trainer = Trainer(settings(freeze_embeddings=True, steps=4, every=4, head_steps=80), loaded, data)
    assert {path.partition(".")[0] for path in flat(trainer.rest)} == set(train.EMBEDDINGS)
    trainer.run(tmp_path)
    assert trainer.evaluations[-1]["phase"] == 2
    after = flat(train.nnx.state(trainer._encoder(trainer.best["encoder"], trainer.rest)))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed and not any(name.startswith(train.EMBEDDINGS) for name in changed)
    chex.assert_trees_all_equal(flat(train.nnx.state(loaded.encoder)), before)  # the loaded encoder is not trained

    other = Trainer(settings(freeze_embeddings=True, steps=4, every=4, head_steps=0), loaded, data)
    other.run(tmp_path / "without")
    assert digest(other.best["encoder"]) == digest(trainer.best["encoder"])
    assert digest(other.best["head"]) != digest(trainer.best["head"])


def test_a_phase_without_gain_ends_early(data: Corpus, tmp_path: Path) -> None:
    still = settings(learning_rate=1e-30, head_learning_rate=1e-30, weight_decay=0, every=2, patience=2)
    trainer = Trainer(still, texts.encoder(), data)
    trainer.run(tmp_path)
    assert [e["step"] for e in trainer.evaluations] == [0, 2, 4, 6, 8]


def test_a_loss_that_is_no_number_ends_the_run(data: Corpus, tmp_path: Path) -> None:
    trainer = Trainer(settings(learning_rate=1e30, head_learning_rate=1e30, warmup=1, every=4), texts.encoder(), data)
    with pytest.raises(ConfigError, match="learning_rate: at step"):
        trainer.run(tmp_path)


def test_answers_all_alike_are_refused() -> None:
    same = [row | {"length": 7, "capped": False} for row in texts.rows(60)]
    with pytest.raises(ConfigError, match="data: "):
        Trainer(settings(formulation="cls"), texts.encoder(), texts.made(same))


# Steps and batches


def test_a_batch_in_pieces_gives_the_same_step(data: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(dropout=0)
    rows = data.rows(TRAIN)[:13]  # three rows only fill the batch
    whole, cut = Trainer(config, texts.encoder(), data), Trainer(config, texts.encoder(), data)
    batch = whole.batch(rows)
    states = []
    for trainer, tokens in ((whole, 4096), (cut, 128)):
        monkeypatch.setattr(train, "TOKENS", tokens)
        assert pieces(*batch.ids.shape) == (1 if tokens == 4096 else 4)
        state, loss = trainer._update(trainer.state, trainer.rest, batch, np.int32(0))
        states.append({**flat(state["encoder"]), **flat(state["head"]), "loss": np.asarray(loss)})
    chex.assert_trees_all_close(states[1], states[0], rtol=2e-3, atol=1e-5)


def test_batches_are_full_and_their_shapes_few(finished: Trainer, data: Corpus) -> None:
    batch = finished.batch(np.asarray([3, 7, 5]))
    chex.assert_shape(batch.ids, (16, 32))
    assert batch.weights.tolist() == [1.0] * 3 + [0.0] * 13
    for i, row in enumerate((3, 7, 5)):
        assert np.asarray(batch.ids)[i][np.asarray(batch.mask)[i]].tolist() == data.ids[row].tolist()
        assert (batch.length[i], batch.capped[i]) == (data.length[row], data.capped[row])
    assert [width_of(n) for n in (1, 32, 33, 97, 512, 513)] == [32, 32, 64, 128, 512, 640]
    assert [pieces(*shape) for shape in ((32, 128), (32, 256), (32, 512), (7, 512), (2, 9999))] == [1, 2, 4, 1, 1]


# Taking up again


@pytest.mark.parametrize("stop", [120, 260])
def test_an_interrupted_run_ends_with_the_same_weights_to_the_bit(
    stop: int, finished: Trainer, data: Corpus, tmp_path: Path
) -> None:
    stopped = Trainer(settings(), texts.encoder(), data)

    def stopping(update: Any) -> Any:
        def step(*args: Any) -> Any:
            if stopped.at.steps == stop:
                raise KeyboardInterrupt
            return update(*args)

        return step

    stopped._update, stopped._update_head = stopping(stopped._update), stopping(stopped._update_head)
    with pytest.raises(KeyboardInterrupt):
        stopped.run(tmp_path)

    resumed = Trainer(settings(), texts.encoder(), data)
    resumed.run(tmp_path)
    assert resumed.evaluations == finished.evaluations
    assert resumed.at == finished.at
    assert digest(resumed.best) == digest(finished.best)
    # Once more, with nothing left to do.
    again = Trainer(settings(), texts.encoder(), data)
    again.run(tmp_path)
    assert digest(again.best) == digest(finished.best)


def test_checkpoints_of_another_run_are_refused(data: Corpus, tmp_path: Path) -> None:
    Trainer(settings(steps=2, every=2, head_steps=0), texts.encoder(), data).run(tmp_path)
    changes = {"formulation": "cls", "width": 8, "seed": 1}
    for name, value in changes.items():
        config = settings(**{"steps": 2, "every": 2, "head_steps": 0, name: value})
        with pytest.raises(ConfigError, match=rf"work: .*{name}: .* there, {value} here"):
            Trainer(config, texts.encoder(), data).run(tmp_path)
    config = settings(steps=2, every=2, head_steps=0)
    with pytest.raises(ConfigError, match="rows and lengths"):
        Trainer(config, texts.encoder(), texts.made(texts.rows(90, seed=1))).run(tmp_path)
    with pytest.raises(ConfigError, match="layers: 1 there, 2 here"):
        Trainer(config, texts.encoder(layers=2), data).run(tmp_path)
    config = settings(steps=2, every=2, head_steps=0, freeze_embeddings=True)
    Trainer(config, texts.encoder(), data).run(tmp_path / "frozen")
    with pytest.raises(ConfigError, match=r"frozen weights: \w+ there, \w+ here"):
        Trainer(config, texts.encoder(seed=1), data).run(tmp_path / "frozen")


def test_a_damaged_checkpoint_is_refused(data: Corpus, tmp_path: Path) -> None:
    config = settings(steps=2, every=2, head_steps=2)
    Trainer(config, texts.encoder(), data).run(tmp_path)
    last = max((tmp_path / "checkpoints").iterdir(), key=lambda path: int(path.name))
    largest = max((p for p in (last / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    largest.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"work: the checkpoint .*{last.name} is damaged"):
        Trainer(config, texts.encoder(), data).run(tmp_path)


# The command


def test_the_command_trains_and_writes_a_predictor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxspec.predict.proxy import ProxyPredictor

    monkeypatch.setattr("jaxspec.train_predictor.data.load_bert", lambda source, layers: texts.encoder())
    rows, out, preset = tmp_path / "rows.jsonl", tmp_path / "out" / "p.safetensors", tmp_path / "tiny.yaml"
    lines = texts.rows(160)
    rows.write_text("".join(json.dumps(row) + "\n" for row in lines))
    preset.write_text(f"data: [{rows}]\nout: {out}\nwork: {tmp_path}\nlongest: 32\nwidth: 16\nlearning_rate: 1e-2\n")
    changes = [f"--set={c}" for c in ("steps=160", "head_steps=40", "every=40", "warmup=2", "batch=16")]
    assert command.main(["--config", str(preset), *changes]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("smollm2-135m, tiny: 160 rows") and "capped" in said[0]
    assert any(line.startswith("step 40, phase 1") and "(the training median: " in line for line in said)
    assert f"wrote {out} (" in "\n".join(said)
    assert said[-1].endswith(f"--set predictor_model={out}")
    test = json.loads((tmp_path / "tiny" / "report.json").read_text())
    predictor = ProxyPredictor.load(out)
    predicted = predictor.predict(["name a tree", "write a letter now"])
    assert predicted[0] < predicted[1]
    assert test["tau"] > 0.3

    assert command.main(["--config", str(preset), *changes, "--set=longest=128"]) == 2
    assert "longest: " in capsys.readouterr().err
    assert command.main(["--config", str(preset), *changes, "--set=data=[/no/such.jsonl]"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("jaxspec.train_predictor: data: ") and "/no/such.jsonl" in line and line.count("\n") == 1


@pytest.mark.parametrize("name", ["optax", "orbax.checkpoint"])
def test_without_the_extra_one_line_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    for module in ("jaxspec.train_predictor.train", "jaxspec.train_predictor.checkpoints"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    assert command.main(["--config", "unread.yaml"]) == 2
    line = capsys.readouterr().err
    assert '".[train]"' in line and line.count("\n") == 1


def test_a_missing_file_is_named_before_anything_is_loaded(monkeypatch, capsys, tmp_path):
    """An encoder, and for rows of token ids the target, may have to be downloaded."""
    for loader in ("load_bert", "load_model"):
        monkeypatch.setattr(f"jaxspec.train_predictor.data.{loader}", lambda *_: pytest.fail("loaded"))
    (ids := tmp_path / "ids.jsonl").write_text('{"prompt_ids": [1], "output_ids": [2]}\n')
    (preset := tmp_path / "p.yaml").write_text("data: [unread]\nout: o.safetensors\n")
    assert command.main(["--config", str(preset), f"--set=data=[{ids}, nope.jsonl]"]) == 2
    said = capsys.readouterr().err
    assert said == "jaxspec.train_predictor: data: cannot read nope.jsonl: No such file or directory\n"
    for change, word in (("encoder=nope", "no encoder 'nope'"), (f"out={ids}/o.safetensors", "out: cannot write to")):
        assert (
            command.main(["--config", str(preset), f"--set=data=[{ids}]", f"--set=work={tmp_path}", f"--set={change}"])
            == 2
        )
        assert word in capsys.readouterr().err
