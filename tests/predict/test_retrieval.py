"""The index of lengths: what it finds, what it drops, what survives a restart, and threads that race for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from helpers.predictors import WIDTH, FakeEncoder, FakePredictor, vector
from jaxspec.predict import index_file
from jaxspec.predict.blend import BlendedPredictor
from jaxspec.predict.index import SAME, LengthIndex
from jaxspec.predict.predictor import Learner
from jaxspec.predict.retrieval import RetrievalPredictor

PROBE = vector("probe")


def index(k: int = 3, threshold: float = 0.9, capacity: int = 100) -> LengthIndex:
    return LengthIndex(k, threshold, capacity)


def vectors(*texts: str) -> np.ndarray:
    return np.stack([vector(text) for text in texts])


def same(a: LengthIndex, b: LengthIndex) -> bool:
    mine, theirs = a.rows(), b.rows()
    names = ("vectors", "lengths", "inserted", "used")
    return all(np.array_equal(getattr(mine, name), getattr(theirs, name)) for name in names)


# -- what it finds -----------------------------------------------------------------------------------------------------


def test_it_knows_nothing_at_first_and_of_strangers() -> None:
    own = index()
    assert np.isnan(own.estimate(vectors("a", "b"))).all()
    own.insert(vectors("a"), [10])
    assert own.estimate(vectors("a", "b")).tolist() == pytest.approx([10, np.nan], nan_ok=True)


def test_neighbours_count_by_their_similarity() -> None:
    own = index(k=2, threshold=0.5)
    own.insert(vectors("a", "a|x", "b"), [10, 40, 1000])
    similarity = float(vector("a") @ vector("a|x"))
    assert 0.98 < similarity < 0.995
    assert own.estimate(vectors("a"))[0] == pytest.approx((10 + similarity * 40) / (1 + similarity), rel=1e-5)
    assert index(k=1, threshold=0.5).estimate(vectors("a")).shape == (1,)
    strict = index(k=2, threshold=0.999)
    strict.insert(vectors("a", "a|x"), [10, 40])
    assert strict.estimate(vectors("a"))[0] == 10


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 500)), min_size=1, max_size=60),
    k=st.integers(1, 5),
    threshold=st.floats(0.05, 1.0),
    asked=st.integers(0, 35),
)
def test_it_finds_what_a_plain_search_finds(rows: list[tuple[int, int]], k: int, threshold: float, asked: int) -> None:
    own = index(k, threshold)
    for text, length in rows:
        own.insert(vectors(str(text)), [length])
    kept = own.rows()
    similarity = kept.vectors @ vector(str(asked))
    near = np.argsort(-similarity, kind="stable")[:k]
    near = near[similarity[near] >= threshold]
    found = own.estimate(vectors(str(asked)))[0]
    close = np.abs(similarity - threshold).min() < 1e-5  # of such a one the last bit decides
    if not close and len(near):
        ends = np.sort(similarity)[::-1]
        if len(ends) <= k or ends[k - 1] - ends[k] > 1e-5 or kept.lengths.min() == kept.lengths.max():
            assert found == pytest.approx(np.average(kept.lengths[near], weights=similarity[near]), rel=1e-4)
    elif not close:
        assert np.isnan(found)


def test_of_one_prompt_the_last_lengths_count() -> None:
    own = index(k=3)
    for length in range(1, 11):
        own.insert(vectors("a"), [length])
        own.insert(vectors("b"), [100])
    assert len(own) == 6
    assert own.estimate(vectors("a"))[0] == pytest.approx(9)


def test_what_is_no_vector_or_no_length_is_left_out() -> None:
    own = index()
    bad = vectors("a", "b", "c", "d", "e", "f")
    bad[0], bad[1, 0], bad[2, 0] = 0, np.nan, np.inf
    own.insert(bad, [1, 2, 3, np.nan, 0, 6])
    assert own.rows().lengths.tolist() == [6]
    assert np.isnan(own.estimate(np.full((1, WIDTH), np.nan))[0])
    with pytest.raises(ValueError, match="2 lengths for 1 vectors"):
        own.insert(vectors("a"), [1, 2])
    for call in (own.estimate, lambda v: own.insert(v, [1])):
        with pytest.raises(ValueError, match="vectors of 8 numbers in an index of 16"):
            call(np.eye(8, dtype=np.float32)[:1])
        with pytest.raises(ValueError, match="rows of a matrix"):
            call(vector("a"))
    assert len(own) == 1


# -- what it drops -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    capacity=st.integers(1, 20),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=120),
    k=st.integers(1, 4),
)
def test_the_least_recently_used_make_room(capacity: int, events: list[tuple[bool, int]], k: int) -> None:
    own = index(k, 0.999, capacity)
    for turn, (asks, text) in enumerate(events):
        before = own.rows()
        if asks:
            own.estimate(vectors(str(text)))
        else:
            own.insert(vectors(str(text)), [turn + 1])
        after = own.rows()
        assert len(own) <= capacity and after.vectors.shape[0] == len(after.lengths) == len(after.used)
        if not asks:
            assert turn + 1 in after.lengths.tolist()
            twins = before.vectors @ vector(str(text)) >= SAME if len(before) else np.zeros(0, bool)
            assert (after.vectors @ vector(str(text)) >= SAME).sum() <= k
            if len(before) == capacity and twins.sum() < k:
                gone = set(before.lengths.tolist()) - set(after.lengths.tolist())
                assert gone == {before.lengths[np.argmin(before.used)]}


def test_a_prompt_that_comes_back_outlives_those_seen_once() -> None:
    own = index(capacity=64)
    own.insert(vectors("often"), [5])
    for i in range(500):
        own.insert(vectors(f"once {i}"), [50])
        if i % 20 == 0:
            own.estimate(vectors("often"))
    assert len(own) == 64
    assert own.estimate(vectors("often"))[0] == pytest.approx(5)


# -- what survives -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(rows=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 500)), max_size=40), capacity=st.integers(1, 50))
def test_a_file_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]], capacity: int
) -> None:
    path = tmp_path_factory.mktemp("index") / "new" / "folder" / "index.safetensors"
    own = index(capacity=50)
    for text, length in rows:
        own.insert(vectors(str(text)), [length])
    index_file.write(path, own.rows(), "model", PROBE)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing half written is left
    again = index(capacity=50)
    again.restore(index_file.read(path, "model", PROBE))
    assert same(own, again)
    smaller = index(capacity=capacity)
    smaller.restore(index_file.read(path, "model", PROBE))
    newest = np.sort(own.rows().used)[-capacity:]
    assert np.array_equal(np.sort(smaller.rows().used), newest)
    for a in (own, again):
        a.insert(vectors("one more"), [3])
    assert same(own, again)


def written(path: Path) -> Path:
    own = index()
    own.insert(vectors("a", "b", "c"), [1, 2, 3])
    index_file.write(path, own.rows(), "model", PROBE)
    return path


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "i")
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with pytest.raises(index_file.IndexUnfit):
            index_file.read(path, "model", PROBE)
    for size in (0, 1, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(index_file.IndexUnfit):
            index_file.read(path, "model", PROBE)


def test_another_models_or_encoders_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "i")
    assert len(index_file.read(path, "model", PROBE)) == 3
    with pytest.raises(index_file.IndexUnfit, match="lengths of model, not of other"):
        index_file.read(path, "other", PROBE)
    for probe in (vector("something else"), vector("probe", 8)):
        with pytest.raises(index_file.IndexUnfit, match="another encoder's"):
            index_file.read(path, "model", probe)
    save_file(load_file(path), path, {"format": "jaxspec-draft-2"})
    with pytest.raises(index_file.IndexUnfit, match="its format is 'jaxspec-draft-2'"):
        index_file.read(path, "model", PROBE)
    save_file({}, path)
    with pytest.raises(index_file.IndexUnfit, match="its format is None"):
        index_file.read(path, "model", PROBE)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "i")
    before = path.read_bytes()

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        written(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


# -- races -------------------------------------------------------------------------------------------------------------


def test_threads_that_race_leave_it_whole(tmp_path: Path) -> None:
    own = index(k=4, threshold=0.999, capacity=50)
    errors: list[Exception] = []
    path = tmp_path / "i"

    def work(me: int) -> None:
        rng = np.random.default_rng(me)
        try:
            for turn in range(150):
                texts = [str(rng.integers(100)) for _ in range(3)]
                if rng.random() < 0.5:
                    own.insert(vectors(*texts), [int(t) + 1 for t in texts])
                else:
                    out = own.estimate(vectors(*texts))
                    for text, length in zip(texts, out, strict=True):
                        assert np.isnan(length) or length == pytest.approx(int(text) + 1)
                if turn % 50 == 0:
                    index_file.write(path, own.rows(), "model", PROBE)
                    index_file.read(path, "model", PROBE)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    rows = own.rows()
    assert len(rows) == 50
    for row, length in zip(rows.vectors, rows.lengths, strict=True):
        assert np.allclose(row, vector(str(int(length) - 1)))
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


# -- the predictor -----------------------------------------------------------------------------------------------------


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
