"""The prediction thread: batched, in time or not at all, and the engine never waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from helpers.predictors import FakePredictor
from helpers.serving import eventually
from jaxspec.predict.service import BATCH, PredictionService


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


class Learning(FakePredictor):
    """Writes down what it learns and when it is told to write that."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.learned: list[tuple[str, int]] = []
        self.flushed = self.kept = 0

    def learn(self, texts: Sequence[str], lengths: Sequence[int]) -> None:
        self.learned += zip(texts, lengths, strict=True)

    def flush(self) -> None:
        if self.kept < len(self.learned):
            self.kept, self.flushed = len(self.learned), self.flushed + 1


class Receiver:
    """The scheduler's part: it knows the requests named, and takes lengths for those."""

    def __init__(self, *known: str) -> None:
        self.known = set(known)
        self.got: dict[str, float] = {}

    def __call__(self, request_id: str, length: float, now: float) -> bool:
        if request_id not in self.known:
            return False
        self.got[request_id] = length
        return True


@contextmanager
def running(predictor: FakePredictor, **options: Any) -> Iterator[PredictionService]:
    service = PredictionService(predictor, decode, **options)
    service.start()
    try:
        yield service
    finally:
        if predictor.gate is not None:
            predictor.gate.set()
        service.close()


def applied(service: PredictionService, to: Receiver, count: int) -> dict[str, float]:
    def all_there() -> bool:
        service.apply(to, 0.0)
        return len(to.got) >= count

    eventually(all_there)
    return to.got


def test_what_gathers_while_one_batch_is_computed_is_the_next() -> None:
    gate = threading.Event()
    predictor = FakePredictor(9, gate)
    with running(predictor) as service:
        service.add("first", [1])
        eventually(lambda: bool(predictor.asked))
        for i in range(BATCH + 8):
            service.add(str(i), [10 + i // 2])  # two answers to each prompt
        begun = time.monotonic()
        receiver = Receiver("first", *map(str, range(BATCH + 8)))
        service.apply(receiver, 0.0)
        assert time.monotonic() - begun < 1 and not receiver.got
        gate.set()
        assert set(applied(service, receiver, BATCH + 9).values()) == {9.0}
    assert [len(texts) for texts in predictor.asked] == [1, BATCH // 2, 4]
    assert predictor.asked[0] == ["1"]
    counts = service.counts
    assert (counts.made, counts.late, counts.without) == (BATCH + 9, 0, 0) and counts.seconds > 0


def test_held_requests_are_predicted_when_asked_for() -> None:
    predictor = FakePredictor(9)
    with running(predictor) as service:
        for name in "abc":
            service.add(name, [ord(name)], at_once=name == "c")
        receiver = Receiver(*"abc")
        assert applied(service, receiver, 1) == {"c": 9.0} and service.counts.made == 1
        service.ended("a", 5, "stop")
        service.predict_held()
        assert applied(service, receiver, 2) == {"b": 9.0, "c": 9.0}
    assert [len(texts) for texts in predictor.asked] == [1, 1]


def test_who_has_ended_is_not_predicted_any_more() -> None:
    gate = threading.Event()
    predictor = FakePredictor(9, gate)
    with running(predictor) as service:
        service.add("a", [1])
        eventually(lambda: bool(predictor.asked))
        service.add("b", [2])
        service.add("c", [3])
        service.ended("a", 5, "stop")
        service.ended("b", 0, "abort")
        service.add("a", [4])  # an id that comes back is another request
        gate.set()
        receiver = Receiver("a", "b", "c")
        assert applied(service, receiver, 2) == {"a": 9.0, "c": 9.0}
        eventually(lambda: service.counts.made == 3)
        service.apply(receiver, 0.0)
    assert predictor.asked == [["1"], ["3", "4"]]
    assert service.counts.late == 1


def test_the_scheduler_may_not_know_it() -> None:
    with running(FakePredictor()) as service:
        service.add("gone", [1])
        receiver = Receiver()
        eventually(lambda: service.apply(receiver, 0.0) or service.counts.late == 1)
    assert not receiver.got


@pytest.mark.parametrize(
    "fault", [RuntimeError("on fire"), np.array([np.nan]), np.array([0.0]), np.array([1.0, 2.0]), None]
)
def test_a_failure_is_logged_once_and_the_next_are_tried(
    caplog: pytest.LogCaptureFixture, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = FakePredictor(9)
    whole = FakePredictor.predict
    wrong = True

    def predict(self: FakePredictor, texts: Sequence[str]) -> Any:
        if not wrong:
            return whole(self, texts)
        if isinstance(fault, Exception):
            raise fault
        return fault

    monkeypatch.setattr(FakePredictor, "predict", predict)
    with caplog.at_level(logging.INFO), running(predictor) as service:
        for i in range(3):
            service.add(str(i), [i])
            eventually(lambda i=i: service.counts.without == i + 1)
        wrong = False
        service.add("well", [7])
        assert applied(service, Receiver("0", "well"), 1) == {"well": 9.0}
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "length predictor failed" in caplog.text


def test_a_predictor_that_hangs_costs_only_predictions(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    predictor = FakePredictor(9, gate)
    service = PredictionService(predictor, decode, most_waiting=5)
    service.start()
    service.add("0", [0])
    eventually(lambda: bool(predictor.asked))
    begun = time.monotonic()
    for i in range(1, 20):
        service.add(str(i), [i])
        service.apply(Receiver(), 0.0)
    assert service.counts.without == 14
    for i in range(20):
        service.ended(str(i), 3, "stop")
    service.close(timeout=0.1)
    assert time.monotonic() - begun < 2
    assert "did not stop within 0.1 s" in caplog.text
    service.add("late", [1])
    assert service.counts.without == 15
    gate.set()
    service.close()


def test_it_learns_from_whole_answers() -> None:
    predictor = Learning(50.0)
    with running(predictor) as service:
        receiver = Receiver(*"abcdef")
        for name in "abcde":
            service.add(name, [ord(name)])
        applied(service, receiver, 5)
        service.ended("a", 20, "stop")
        service.ended("b", 20, "length")  # cut off before what was predicted: it tells nothing
        service.ended("c", 80, "length")
        service.ended("d", 20, "abort")
        service.ended("e", 0, "stop")
        service.ended("unknown", 20, "stop")
        eventually(lambda: len(predictor.learned) == 2)
    assert predictor.learned == [(decode([ord("a")]), 20), (decode([ord("c")]), 80)]
    assert predictor.flushed == 1


def test_what_ended_before_its_prediction_is_learned_too() -> None:
    gate = threading.Event()
    predictor = Learning(50.0, gate)
    with running(predictor) as service:
        service.add("a", [1])
        eventually(lambda: bool(predictor.asked))
        service.add("b", [2])
        service.ended("b", 12, "stop")
        gate.set()
    assert predictor.learned == [("2", 12)] and predictor.asked == [["1"]]


def test_it_writes_from_time_to_time_also_while_nothing_comes() -> None:
    predictor = Learning(50.0)
    with running(predictor, flush_every=0.1) as service:
        service.add("a", [1])
        service.ended("a", 20, "stop")
        eventually(lambda: predictor.flushed == 1)
        time.sleep(0.3)
        assert predictor.flushed == 1  # nothing new
        service.add("b", [1])
        service.ended("b", 20, "stop")
        eventually(lambda: predictor.flushed == 2)
    assert predictor.flushed == 2


def test_close_takes_in_everything() -> None:
    predictor = Learning(50.0)
    with running(predictor) as service:
        for i in range(3 * BATCH):
            service.add(str(i), [i])
            service.ended(str(i), i + 1, "stop")
    assert len(predictor.learned) == 3 * BATCH and predictor.flushed == 1
    service.close()
    PredictionService(FakePredictor(), decode).close()


def test_long_prompts_are_read_from_their_end() -> None:
    predictor = FakePredictor()
    with running(predictor) as service:
        service.add("a", list(range(5000)))
        applied(service, Receiver("a"), 1)
    assert predictor.asked == [[decode(range(5000 - 2048, 5000))]]
