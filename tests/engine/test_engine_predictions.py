"""The engine with a length predictor: requests do not wait for it, it changes the order, and it may fail."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import encoders, tiny
from helpers.patience import PATIENCE
from helpers.predictors import FakeEncoder, FakePredictor
from helpers.serving import eventually
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.predict.build import build
from jaxspec.predict.service import NoPredictions, PredictionService
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.slo import Slo
from jaxspec.serve.metrics import ServerMetrics

SETTINGS: dict[str, Any] = dict(
    draft=[], page_size=16, max_num_seqs=1, token_buckets=[1, 16], kv_cache_tokens=1024, max_num_batched_tokens=16,
    max_model_len=96, predictor="proxy", order="sjf", compile_in_background=False,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(autouse=True)
def _encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxspec.predict.build.load_encoder", lambda source: FakeEncoder())


@contextmanager
def started(compiled: str, proxy: FakePredictor | None, **settings: Any) -> Iterator[Engine]:
    config = EngineConfig.load(None, **{**SETTINGS, "compilation_cache_dir": compiled, **settings})
    engine = Engine(config, model=tiny.model(), proxy=proxy)
    engine.start()
    try:
        yield engine
    finally:
        if proxy is not None and proxy.gate is not None:
            proxy.gate.set()
        engine.shutdown()


class Answers:
    """What requests wrote, in the order in which they ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, RequestMetrics] = {}

    def ask(
        self,
        name: str,
        prompt: Sequence[int] = PROMPT,
        tokens: int = 8,
        meanwhile: Callable[[int], None] = lambda count: None,
        **params: Any,
    ) -> None:
        """`meanwhile` is called in the engine's thread, with how many tokens there are."""

        def take(delta: OutputDelta) -> None:
            self.tokens[name] += delta.token_ids
            meanwhile(len(self.tokens[name]))
            if delta.finish_reason is not None:
                assert delta.metrics is not None
                self.ended[name] = delta.metrics

        self.tokens[name] = []
        self._engine.submit(prompt, replace(GREEDY, max_tokens=tokens, **params), take, request_id=name)

    def after_first(self, others: dict[str, tuple[list[int], int]]) -> None:
        """Run a request, and after it others (prompt, tokens), which wait until all lengths have been predicted. The
        first request ends first."""
        runs, asked = threading.Event(), threading.Event()

        def hold(count: int) -> None:
            if count == 1:
                runs.set()
                assert asked.wait(PATIENCE)
            elif count == 4:  # by now the engine has taken them in
                eventually(lambda: self._engine.stats().predictions.made == 1 + len(others))

        self.ask("first", [90, 1], 20, hold)
        assert runs.wait(PATIENCE)
        for name, (prompt, tokens) in others.items():
            self.ask(name, prompt, tokens)
        asked.set()
        assert self.wait(1 + len(others))[0] == "first"

    def wait(self, count: int) -> list[str]:
        eventually(lambda: len(self.ended) >= count)
        return list(self.ended)


class ByText(FakePredictor):
    """Predicts what the first byte of the prompt says."""

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        super().predict(texts)
        return np.array([float(ord(text[0])) for text in texts])


def test_requests_run_before_their_prediction_is_there(compiled: str) -> None:
    gate = threading.Event()
    proxy = FakePredictor(5, gate)
    with started(compiled, proxy) as engine:
        assert proxy.warm == 1
        answers = Answers(engine)
        answers.ask("a")
        answers.ask("b")
        assert answers.wait(2) == ["a", "b"]
        assert answers.tokens["a"] == answers.tokens["b"] == tiny.greedy(PROMPT, 8)
        assert answers.ended["a"].predicted_tokens is None
        gate.set()
        answers.ask("c")
        answers.ask("d")
        answers.wait(4)
        assert answers.tokens["d"] == tiny.greedy(PROMPT, 8)
        eventually(lambda: engine.stats().predictions.made >= 2)
        assert engine.stats().predictions.seconds > 0


def test_only_lengths_that_may_decide_are_predicted(compiled: str) -> None:
    with started(compiled, FakePredictor(5), max_num_seqs=4) as engine:
        answers = Answers(engine)
        answers.ask("alone")
        answers.wait(1)
        assert answers.ended["alone"].predicted_tokens is None and engine.stats().predictions.made == 0

        def until(made: int) -> Callable[[OutputDelta], None]:
            """Holds a request until its length is predicted: one that has ended needs no prediction."""
            return lambda delta: eventually(lambda: engine.stats().predictions.made >= made)

        engine.submit(PROMPT, GREEDY, until(1), predict=True)
        eventually(lambda: engine.stats().predictions.made == 1)
        engine.submit(PROMPT, GREEDY, until(2), slo=Slo(tpot=1.0))
        eventually(lambda: engine.stats().predictions.made == 2)


def test_predictions_change_who_is_next(compiled: str) -> None:
    others = {"long": 60, "middle": 40, "short": 20}
    with started(compiled, ByText()) as engine:
        answers = Answers(engine)
        answers.after_first({name: ([byte, 1], 70) for name, byte in others.items()})
        assert answers.wait(4) == ["first", "short", "middle", "long"]
        for name, byte in others.items():
            assert answers.tokens[name] == tiny.greedy([byte, 1], 70)
        # What was predicted first is told, not what it was corrected to when it was outlived.
        predicted = {name: metrics.predicted_tokens for name, metrics in answers.ended.items()}
        assert {name: predicted[name] for name in others} == others


def test_no_more_is_predicted_than_may_be_written(compiled: str) -> None:
    with started(compiled, FakePredictor(5000)) as engine:
        answers = Answers(engine)
        answers.after_first({"second": (PROMPT, 11)})
        assert answers.ended["second"].predicted_tokens == 11


def test_a_predictor_that_fails_leaves_serving_untouched(compiled: str, caplog: pytest.LogCaptureFixture) -> None:
    proxy = FakePredictor()
    proxy.fail = RuntimeError("on fire")
    with caplog.at_level(logging.WARNING), started(compiled, proxy) as engine:
        answers = Answers(engine)
        for i in range(6):
            answers.ask(str(i), tokens=20)
        answers.wait(6)
        assert all(tokens == tiny.greedy(PROMPT, 20) for tokens in answers.tokens.values())
        eventually(lambda: engine.stats().predictions.without > 0)
        assert engine.health == "ok"
    assert sum("length predictor failed" in r.message for r in caplog.records) == 1


def test_cancelled_requests_are_forgotten(compiled: str) -> None:
    gate = threading.Event()
    proxy = FakePredictor(5, gate)
    with started(compiled, proxy) as engine:
        answers = Answers(engine)
        for i in range(6):
            answers.ask(str(i), [i + 1], tokens=80)
        for i in range(6):
            engine.cancel(str(i))
        answers.wait(6)
        gate.set()
        answers.ask("after")
        answers.wait(7)
        predictions = engine.loop.predictions
        assert engine.health == "ok" and isinstance(predictions, PredictionService)
        eventually(lambda: not predictions._live)


def test_retrieval_learns_from_what_was_served_and_keeps_it(compiled: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    settings = dict(predictor="retrieval", retrieval={"path": str(path)})
    prompts = [[i, i, i] for i in range(1, 8)]
    with started(compiled, FakePredictor(1), **settings) as engine:
        answers = Answers(engine)
        for i, prompt in enumerate(prompts[:5]):  # cut off, but longer than predicted
            answers.ask(str(i), prompt, 20 + i, ignore_eos=False)
        # The request's own doing, not the model's: it teaches nothing.
        answers.ask("5", prompts[5], 60, stop_token_ids=[tiny.greedy(prompts[5], 9)[-1]], ignore_eos=False)
        answers.ask("6", prompts[6], 30, ignore_eos=True)
        answers.wait(7)
    lengths = [answers.ended[str(i)].output_tokens for i in range(5)]
    assert path.exists() and not path.with_name("lengths.unusable").exists()
    proxy = FakePredictor(1)
    with started(compiled, proxy, **settings) as engine:
        answers = Answers(engine)
        answers.after_first({str(i): (prompt, 60) for i, prompt in enumerate(prompts)})
        assert [answers.ended[str(i)].predicted_tokens for i in range(7)] == pytest.approx([*lengths, 1, 1])


def test_a_damaged_index_never_stops_the_engine(
    compiled: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(b"\x00" * 100)
    settings = dict(predictor="retrieval", retrieval={"path": str(path)})
    with started(compiled, FakePredictor(3), **settings) as engine:
        answers = Answers(engine)
        answers.ask("a")
        answers.wait(1)
        assert engine.health == "ok"
    assert "cannot use the lengths" in caplog.text and path.with_name("lengths.unusable").exists()


def test_prometheus_reports_error_and_time_of_predictions(compiled: str) -> None:
    with started(compiled, FakePredictor(30)) as engine:
        metrics = ServerMetrics(engine, "tiny")
        answers = Answers(engine)
        answers.after_first({"second": (PROMPT, 40)})
        text = metrics.render().decode()

    def value(name: str) -> float:
        found = re.search(rf"^jaxspec:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    # The first writes 20 tokens, and may not write more; the second 40.
    assert value("length_prediction_error_tokens_count") == value("length_prediction_relative_error_count") == 2
    assert value("length_prediction_error_tokens_sum") == 10
    assert value("length_prediction_relative_error_sum") == pytest.approx(0.25)
    assert value("length_predictions_total") == 2
    assert value("length_predictions_missing_total") == value("length_predictions_late_total") == 0
    assert value("length_prediction_seconds_total") > 0 and value("step_seconds_total") > 0


def test_the_oracles_predictions_are_reported_too(compiled: str) -> None:
    with started(compiled, FakePredictor(), predictor="oracle") as engine:
        answers = Answers(engine)
        answers.ask("a", tokens=13)
        answers.wait(1)
        assert answers.ended["a"].predicted_tokens == 13
        assert engine.stats().predictions.made == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "^predictor_model: no length predictor ships with the package for tiny; set another model"),
        ({"predictor_model": "nowhere/x.safetensors"}, "^predictor_model: .*nowhere/x.safetensors"),
        ({"predictor": "retrieval", "retrieval": {"path": "."}}, r"^retrieval\.path: \. is a folder"),
    ],
)
def test_a_predictor_that_is_not_there_is_named(compiled: str, settings: dict[str, Any], says: str) -> None:
    config = EngineConfig.load(None, **{**SETTINGS, "compilation_cache_dir": compiled, **settings})
    proxy = FakePredictor() if "retrieval" in settings else None
    with pytest.raises(ConfigError, match=says):
        Engine(config, model=tiny.model(), proxy=proxy)


def test_auto_predicts_where_something_can(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.load(None, **{**SETTINGS, "compilation_cache_dir": compiled, "predictor": "auto"})
    assert isinstance(build(config, tiny.model(), time.monotonic), NoPredictions)
    assert isinstance(build(config, tiny.model(), time.monotonic, FakePredictor()), PredictionService)
    named = config.model_copy(update={"predictor_model": "nowhere/x.safetensors"})
    with pytest.raises(ConfigError, match=r"nowhere/x\.safetensors"):
        build(named, tiny.model(), time.monotonic)
    loaded: list[str | None] = []
    monkeypatch.setattr(
        "jaxspec.predict.build.load_proxy", lambda name, model, **_: loaded.append(model) or FakePredictor()
    )
    assert isinstance(build(config, replace(tiny.model(), name="smollm2-135m"), time.monotonic), PredictionService)
    assert loaded == ["smollm2-135m"]


@pytest.mark.slow
def test_nothing_compiles_while_a_trained_predictor_serves(compiled: str, tmp_path: Path) -> None:
    trained = encoders.proxy()
    trained.save(tmp_path / "own.safetensors")
    settings = dict(
        predictor="retrieval", predictor_model=str(tmp_path / "own.safetensors"), retrieval={"path": "", "k": 2}
    )
    tiny.greedy(PROMPT, 8)
    with started(compiled, None, **settings) as engine:
        answers = Answers(engine)
        for turn, byte in enumerate(b"abcd" * 3):
            answers.ask(str(turn), [byte] * (1 + 7 * turn), tokens=8)
        answers.wait(12)
        eventually(lambda: engine.stats().predictions.made + engine.stats().predictions.late >= 6)
        stats = engine.stats()
        assert stats.predictions.without == 0 and stats.compilations_after_warmup == 0
        assert all(answers.ended[str(i)].output_tokens == 8 for i in range(12))
