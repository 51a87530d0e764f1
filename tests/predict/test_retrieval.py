"""Prediction by retrieval: strangers, blends with the proxy, what is remembered, and the file across restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.length_index import index, vectors, written
from helpers.predictors import FakeEncoder, FakePredictor
from jaxspec.predict.blend import BlendedPredictor
from jaxspec.predict.predictor import Learner
from jaxspec.predict.retrieval import RetrievalPredictor


def predictor(
    path: Path | None = None,
    proxy: FakePredictor | None = None,
    encoder: FakeEncoder | None = None,
    user_text: Callable[[str], str] = str,
    **options: Any,
) -> RetrievalPredictor:
    made = RetrievalPredictor(
        proxy or FakePredictor(), encoder or FakeEncoder(), index(**options), "model", path, user_text
    )
    made.warm_up()
    return made


def test_strangers_get_the_proxys_length() -> None:
    proxy = FakePredictor(length=7)
    own = predictor(proxy=proxy)
    assert isinstance(own, Learner) and not isinstance(proxy, Learner)
    assert own.predict([]).shape == (0,)
    assert own.predict(["a", "b", "a"]).tolist() == [7, 7, 7]
    own.learn(["a"], [20])
    assert own.predict(["b", "a"]).tolist() == pytest.approx([7, 20])
    assert (own.found, own.asked) == (1, 4)
    assert proxy.asked == [["a", "b"]]  # once each, for predicting and learning
    own.learn(["c"], [30])
    assert own.predict(["c"]).tolist() == pytest.approx([30])


def test_a_blend_trusts_neighbours_that_agree() -> None:
    """Of the proxy's 100 tokens and others' lengths, all in logarithms."""
    proxy = FakePredictor(length=100)
    own = BlendedPredictor(proxy, FakeEncoder(), index(k=8, threshold=0.5), "model")
    own.warm_up()
    assert own.predict(["a"]).tolist() == pytest.approx([100]), "no neighbour yet"
    own.index.insert(vectors("a"), [400])
    assert own.predict(["a"]).tolist() == pytest.approx([(100 * 400**2) ** (1 / 3)], rel=0.1), "one, half as uncertain"
    agree, differ = ([400] * 7, [100, 1600, 100, 1600, 100, 1600, 400])
    found = []
    for lengths in (agree, differ):
        own.index.restore(index().rows())
        own.index.insert(vectors(*["a"] * 7), lengths)
        found.append(own.predict(["a"])[0])
    assert 350 < found[0] <= 400 and 150 < found[1] < 0.8 * found[0]
    assert proxy.asked == [["a"]], "the proxy's predictions are remembered"


def test_a_blend_learns_how_wrong_the_proxy_is() -> None:
    found = []
    for true in (100, 800):
        own = BlendedPredictor(FakePredictor(length=100), FakeEncoder(), index(threshold=0.5), "model")
        own.warm_up()
        for i in range(100):
            own.predict([f"prompt {i}"])
            own.learn([f"prompt {i}"], [true])
        own.index.restore(index().rows())
        own.index.insert(vectors("a", "a"), [200, 400])
        found.append(own.predict(["a"])[0])
    assert 100 < found[0] < 200 < found[1] <= 283, "a proxy that is right counts more"


def test_what_was_read_is_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxspec.predict.retrieval._REMEMBERED", 3)
    encoder, proxy = FakeEncoder(), FakePredictor()
    own = predictor(proxy=proxy, encoder=encoder)
    encoder.asked.clear()  # the probe
    for texts in (["a", "b", "c", "d"], ["d"], ["a"], ["c"]):
        own.predict(texts)
    assert encoder.asked == proxy.asked == [["a", "b", "c", "d"], ["a"]]


def test_the_proxy_reads_only_what_is_like_no_other() -> None:
    encoder, proxy = FakeEncoder(), FakePredictor(length=7)
    own = predictor(proxy=proxy, encoder=encoder, user_text=lambda text: text.removeprefix("user: "))
    assert proxy.warm == encoder.warm == 1 and "fake" in own.name
    own.learn(["user: a"], [20])
    assert own.predict(["user: a", "user: b"]).tolist() == pytest.approx([20, 7])
    assert encoder.asked[1:] == [["a"], ["b"]]  # what users wrote
    assert proxy.asked == [["user: b"]]  # the prompt as the proxy was trained to read it


def test_it_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "i"
    own = predictor(path)
    own.flush()
    assert not path.exists()  # nothing learned, nothing written
    own.learn(["a", "b"], [20, 30])
    own.flush()
    again = predictor(path)
    assert again.predict(["b", "a", "c"]).tolist() == pytest.approx([30, 20, 7])
    kept = path.read_bytes()
    own.flush()
    assert path.read_bytes() == kept


@pytest.mark.parametrize("fault", ["damaged", "model", "encoder", "no index"])
def test_a_file_that_does_not_fit_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    path = written(tmp_path / "i")
    if fault == "damaged":
        path.write_bytes(path.read_bytes()[:-3])
    elif fault == "no index":
        path.write_bytes(b"Dear diary")
    before = path.read_bytes()
    model = "other" if fault == "model" else "model"
    with caplog.at_level(logging.WARNING):
        own = RetrievalPredictor(FakePredictor(), FakeEncoder(), index(), model, path)
        own.warm_up()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text and "it was renamed to" in caplog.text
    assert not path.exists() and path.with_name("i.unusable").read_bytes() == before
    own.learn(["a"], [20])
    own.flush()
    assert path.exists()
    again = RetrievalPredictor(FakePredictor(), FakeEncoder(), index(), model, path)
    again.warm_up()
    assert again.predict(["a"]).tolist() == pytest.approx([20])


def test_what_was_set_aside_before_stays(tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        (tmp_path / "i").write_bytes(content)
        predictor(tmp_path / "i")
    assert (tmp_path / "i.unusable").read_bytes() == b"first" and (tmp_path / "i.unusable1").read_bytes() == b"second"


def test_a_file_that_cannot_be_read_now_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "i")
    before = path.read_bytes()

    def failing(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("jaxspec.predict.index_file.read", failing)
        own = predictor(path)
    own.learn(["a"], [20])
    own.flush()
    assert path.read_bytes() == before and "new ones are not kept" in caplog.text


def test_a_folder_that_takes_no_file_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    own = predictor(tmp_path / "file" / "i")
    for length in (20, 21):
        own.learn(["a"], [length])
        own.flush()
    assert own.predict(["a"]).tolist() == pytest.approx([20.5])
    assert sum("cannot write the lengths" in r.message for r in caplog.records) == 1
