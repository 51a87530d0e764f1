"""The index of lengths: what it finds, what it drops, what survives a restart, and threads that race for it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from helpers.length_index import PROBE, index, vectors, written
from helpers.predictors import WIDTH, vector
from jaxspec.predict import index_file
from jaxspec.predict.index import SAME, LengthIndex


def estimates(own: LengthIndex, asked: np.ndarray) -> np.ndarray:
    """Mean length of the neighbours of each vector `[n]`, NaN without any."""
    return np.asarray([near.mean for near in own.near(asked)])


def same(a: LengthIndex, b: LengthIndex) -> bool:
    mine, theirs = a.rows(), b.rows()
    names = ("vectors", "lengths", "inserted", "used")
    return all(np.array_equal(getattr(mine, name), getattr(theirs, name)) for name in names)


# -- what it finds -----------------------------------------------------------------------------------------------------


def test_it_knows_nothing_at_first_and_of_strangers() -> None:
    own = index()
    assert np.isnan(estimates(own, vectors("a", "b"))).all()
    own.insert(vectors("a"), [10])
    assert estimates(own, vectors("a", "b")).tolist() == pytest.approx([10, np.nan], nan_ok=True)


def test_neighbours_count_by_their_similarity() -> None:
    own = index(k=2, threshold=0.5)
    own.insert(vectors("a", "a|x", "b"), [10, 40, 1000])
    similarity = float(vector("a") @ vector("a|x"))
    assert 0.98 < similarity < 0.995
    assert estimates(own, vectors("a"))[0] == pytest.approx((10 + similarity * 40) / (1 + similarity), rel=1e-5)
    assert estimates(index(k=1, threshold=0.5), vectors("a")).shape == (1,)
    strict = index(k=2, threshold=0.999)
    strict.insert(vectors("a", "a|x"), [10, 40])
    assert estimates(strict, vectors("a"))[0] == 10


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
    found = estimates(own, vectors(str(asked)))[0]
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
    assert estimates(own, vectors("a"))[0] == pytest.approx(9)


def test_what_is_no_vector_or_no_length_is_left_out() -> None:
    own = index()
    bad = vectors("a", "b", "c", "d", "e", "f")
    bad[0], bad[1, 0], bad[2, 0] = 0, np.nan, np.inf
    own.insert(bad, [1, 2, 3, np.nan, 0, 6])
    assert own.rows().lengths.tolist() == [6]
    assert np.isnan(estimates(own, np.full((1, WIDTH), np.nan))[0])
    with pytest.raises(ValueError, match="2 lengths for 1 vectors"):
        own.insert(vectors("a"), [1, 2])
    for call in (own.near, lambda v: own.insert(v, [1])):
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
            estimates(own, vectors(str(text)))
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
            estimates(own, vectors("often"))
    assert len(own) == 64
    assert estimates(own, vectors("often"))[0] == pytest.approx(5)


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
                    out = estimates(own, vectors(*texts))
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
