"""Rows of prompts and lengths: what files hold, which answers were cut, the parts, batches, and the metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from flax import nnx

from helpers import prompts_with_lengths as texts
from helpers import tiny
from helpers.fakes import ByteTokenizer
from helpers.paths import CONFIGS
from jaxspec.config import ConfigError
from jaxspec.models.bert import BertEncoder
from jaxspec.models.load.bert import LoadedEncoder
from jaxspec.predict.predictor import clip
from jaxspec.train_predictor.answers import Origin
from jaxspec.train_predictor.config import PredictorConfig
from jaxspec.train_predictor.data import (
    TEST,
    TRAIN,
    VALIDATION,
    Row,
    batches,
    corpus,
    group_of,
    part_of,
    prepare,
    read_rows,
)
from jaxspec.train_predictor.evaluate import evaluate, macro_f1
from jaxspec.train_predictor.train import Trainer

END = ByteTokenizer().end_id


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(**changes: Any) -> PredictorConfig:
    return PredictorConfig(
        **{"data": ["unread"], "work": "unread", "out": "unread.safetensors", "target": "tiny", **changes}
    )


def unread() -> Any:
    raise AssertionError("the target's tokenizer is needed for token ids only")


# Rows


def test_prompts_with_lengths_are_read_as_they_are(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        [{"prompt": "a", "length": 3}, {"prompt": "b", "length": 9, "capped": True, "group": "a"},
         {"prompt": "c", "length": 9}, {"prompt": "d", "length": 9, "capped": False}],
    )  # fmt: skip
    rows = read_rows([path, path], unread, cap=9)
    assert rows[:4] == rows[4:]
    assert [(r.prompt, r.length, r.capped) for r in rows[:4]] == [
        ("a", 3, False), ("b", 9, True), ("c", 9, True), ("d", 9, False)
    ]  # fmt: skip
    assert [r.group for r in rows[:3]] == [group_of("a"), "a", group_of("c")]
    assert not read_rows([path], unread)[2].capped
    assert len(read_rows([path, path], unread, limit=5)) == 5


def test_answers_in_token_ids_are_decoded_and_known_to_be_cut(tmp_path: Path) -> None:
    prompt = {"prompt_ids": [104, 105, END, 33]}
    path = write_lines(
        tmp_path / "a.jsonl",
        [prompt | {"output_ids": [1, 2, END]}, prompt | {"output_ids": [1, 2, 3, 4]},
         prompt | {"output_ids": [1, 2, 3, END]}, prompt | {"output_ids": [1, 2, 3]},
         prompt | {"output_ids": [1, 2], "finished": False}, prompt | {"output_ids": [1, 2, 3, 4], "finished": True}],
    )  # fmt: skip
    rows = read_rows([path], ByteTokenizer, cap=4)  # type: ignore[arg-type]
    assert {r.prompt for r in rows} == {"hi!"} and len({r.group for r in rows}) == 1
    assert [(r.length, r.capped) for r in rows] == [
        (3, False), (4, True), (4, False), (3, False), (2, True), (4, False)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"^cap: .*row 2"):
        read_rows([path], ByteTokenizer)  # type: ignore[arg-type]


def test_collected_answers_are_read_as_text_and_belong_to_the_target(tmp_path: Path) -> None:
    own = Origin("tiny", "12ab")
    row = {"prompt": "user hi", "length": 2, "capped": True, "group": "g", "prompt_ids": [104], "output_ids": [1, 2]}
    path = write_lines(tmp_path / "a.jsonl", [row | own.fields])
    assert read_rows([path], unread, origin=lambda: own) == [Row("user hi", 2, True, "g")]
    with pytest.raises(ConfigError, match="answers of another model that is also called tiny"):
        read_rows([path], unread, origin=lambda: Origin("tiny", "34cd"))


def test_token_ids_of_another_model_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Origin("tiny", "12ab")
    row = {"prompt_ids": [104], "output_ids": [1, END]}
    for other, words in (
        (Origin("rand", "34cd").fields, "answers of rand, not of tiny"),
        ({"model": "rand"}, "answers of rand, not of tiny"),
        (Origin("tiny", "34cd").fields, "answers of another model that is also called tiny"),
    ):
        path = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "length": 1}, row | own.fields, row | other])
        with pytest.raises(ConfigError, match=rf"^data: .*a\.jsonl holds {words}: set another `target`"):
            read_rows([path], ByteTokenizer, origin=lambda: own)  # type: ignore[arg-type]
        assert len(read_rows([path], ByteTokenizer, limit=2, origin=lambda: own)) == 2  # type: ignore[arg-type]
    assert not caplog.records
    path = write_lines(tmp_path / "a.jsonl", [row, row, row | own.fields])
    assert len(read_rows([path], ByteTokenizer, origin=lambda: own)) == 3  # type: ignore[arg-type]
    assert "2 answers name no model" in caplog.text


def test_the_target_decides_which_token_ids_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxspec.train_predictor.data.load_model", lambda name: tiny.model())
    monkeypatch.setattr("jaxspec.train_predictor.data.load_bert", lambda *_: texts.encoder())
    row = {"prompt_ids": [104], "output_ids": [1, END], "model": "rand", "model_digest": "34cd"}
    path = write_lines(tmp_path / "a.jsonl", [row])
    with pytest.raises(ConfigError, match="answers of rand, not of tiny"):
        prepare(settings(data=[path], longest=32))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "a"}, "length"),
        ({"prompt": "a", "length": 0}, "length"),
        ({"prompt": "a", "length": True}, "length"),
        ({"prompt": 1, "length": 2}, "prompt"),
        ({"prompt": "a", "length": 2, "capped": "no"}, "capped"),
        ({"prompt_ids": [1]}, "output_ids"),
        ({"prompt_ids": "1", "output_ids": [1]}, "prompt_ids"),
        ({"prompt_ids": [1], "output_ids": []}, "output_ids"),
        ([1], "not a JSON object"),
    ],
)
def test_a_row_of_no_use_is_named(line: Any, words: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "length": 1}, line])
    with pytest.raises(ConfigError, match=rf"^data: .*a\.jsonl.*2.*{words}"):
        read_rows([path], ByteTokenizer, cap=4)  # type: ignore[arg-type]


def test_files_of_no_use_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data: cannot read .*none\.jsonl"):
        read_rows([str(tmp_path / "none.jsonl")], unread)
    with pytest.raises(ConfigError, match="data: no rows"):
        read_rows([write_lines(tmp_path / "a.jsonl", [])], unread)


# Parts


def test_a_conversation_falls_into_one_part() -> None:
    parts = [part_of(str(i), 0.1, 0.2) for i in range(4000)]
    assert parts == [part_of(str(i), 0.1, 0.2) for i in range(4000)]
    shares = np.bincount(parts) / len(parts)
    np.testing.assert_allclose(shares[[TRAIN, VALIDATION, TEST]], [0.7, 0.1, 0.2], atol=0.03)
    rows = [Row(f"turn {turn} of {i}", 1 + i, False, str(i)) for i in range(60) for turn in range(3)]
    data = corpus(rows, lambda text: [len(text)], 0.2, 0.2)
    for i in range(60):
        assert len(set(data.part[3 * i : 3 * i + 3])) == 1
    assert sorted(np.concatenate([data.rows(p) for p in range(3)])) == list(range(180))


def test_too_little_data_is_refused() -> None:
    rows = [Row("a", 1, False, "a")]
    with pytest.raises(ConfigError, match="data: 1 conversations are too few"):
        corpus(rows, lambda text: [1], 0.1, 0.1)
    cut = [Row(str(i), 8, True, str(i)) for i in range(90)]
    with pytest.raises(ConfigError, match="every training answer was cut"):
        corpus(cut, lambda text: [1], 0.1, 0.1)


def test_an_epoch_has_every_row_once_and_like_widths_together() -> None:
    rng = np.random.default_rng(0)
    widths = rng.integers(3, 100, 200)
    order = np.flatnonzero(np.arange(200) % 3)
    one, other = (list(batches(order, widths.tolist(), 8, 64, np.random.default_rng(seed))) for seed in (1, 2))
    assert sorted(np.concatenate(one)) == sorted(np.concatenate(other)) == order.tolist()
    assert [g.tolist() for g in one] != [g.tolist() for g in other]
    assert [len(g) for g in one].count(8) >= len(one) - 1
    spread = np.mean([np.ptp(widths[g]) for g in one])
    assert spread < 25 < np.ptp(widths), "what is padded is little"


def test_rows_are_padded_no_further_than_longest() -> None:
    """An encoder with 40 positions cannot read the fixed width of 64."""
    config = replace(texts.encoder().config, max_positions=40)
    loaded = LoadedEncoder(config, BertEncoder(config, nnx.Rngs(0)), texts.tokenizer())
    rows = [Row(f"{n} {n * 'tree '}", n, False, str(n)) for n in range(1, 61)]
    data = corpus(rows, lambda text: clip(loaded.tokenizer, text, 36), 0.2, 0.2)
    trainer = Trainer(settings(longest=36, batch=4), loaded, data)
    chex.assert_shape(trainer.vectors(np.arange(60), trainer.state), (60, config.hidden))
    chex.assert_shape(trainer.batch(np.arange(4)).ids, (4, 32))
    chex.assert_shape(trainer.batch(np.arange(56, 60)).ids, (4, 36))


# Metrics


def test_cut_answers_count_only_for_what_is_known_of_them() -> None:
    bounds = np.asarray([10.0, 20.0])
    length = np.asarray([5, 15, 30, 30, 12])
    capped = np.asarray([False, False, False, True, True])
    predicted = np.asarray([8.0, 25.0, 26.0, 99.0, 3.0])
    found = evaluate(predicted, length, capped, bounds)
    assert (found["rows"], found["capped"], found["capped_reached"]) == (5, 2, 0.5)
    assert found["mae"] == pytest.approx((3 + 10 + 4) / 3)
    assert found["error_ratio"] == pytest.approx(17 / 50)
    assert found["class_rows"] == 4, "cut at 12 it may be of either class above"
    assert found["accuracy"] == 0.75
    # Classes: true 0 1 2 2, said 0 2 2 2.
    assert found["macro_f1"] == pytest.approx((1 + 0 + 4 / 5) / 3)
    assert -1 <= found["tau"] < 1
    assert evaluate(length.astype(float), length, capped, bounds)["tau"] == pytest.approx(1)


def test_nothing_known_is_no_number() -> None:
    cut = np.ones(3, bool)
    found = evaluate(np.asarray([1.0, 2.0, 3.0]), np.asarray([8, 8, 8]), cut, np.asarray([9.0]))
    assert found["class_rows"] == 0 and found["capped_reached"] == 0
    assert all(np.isnan(found[key]) for key in ("mae", "error_ratio", "accuracy", "macro_f1", "tau"))


def test_f1_is_the_mean_over_classes_that_occur() -> None:
    assert macro_f1(np.asarray([0, 0, 1, 1]), np.asarray([0, 1, 1, 1])) == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert macro_f1(np.asarray([2, 2]), np.asarray([2, 2])) == 1


# Settings


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("data: [a]\nout: o.safetensors\nlayerz: 2\n", "layerz"),
        ("data: []\nout: o.safetensors\n", "data"),
        ("data: [a]\nout: o\n", "out: .*safetensors"),
        ("data: [a]\nout: o.safetensors\nformulation: l1\n", "formulation: .*reg_l1"),
        ("data: [a]\nout: o.safetensors\nbatch: 1\n", "batch"),
        ("data: [a]\nout: o.safetensors\ndropout: 1\n", "dropout"),
        ("data: [a]\nout: o.safetensors\nvalidation: 0.45\ntest: 0.4\n", "validation and test"),
        ("data: [\n", "cannot read"),
    ],
)
def test_bad_settings_are_named(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        PredictorConfig.load(path)


@pytest.mark.parametrize("path", sorted((CONFIGS / "predictor").glob("*.yaml")), ids=str)
def test_the_presets_load(path: Path) -> None:
    assert PredictorConfig.load(path, steps=3).steps == 3


def test_the_tests_own_data_is_as_it_says() -> None:
    rows = texts.rows(50)
    assert {r["capped"] for r in rows} == {True, False}
    assert all(r["length"] == 128 for r in rows if r["capped"])
