"""SLOs in the engine and `LLM`: reported, refused where impossible, admitted where they can be met."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest

from helpers import tiny
from helpers.generation import check_clean
from helpers.patience import PATIENCE
from helpers.serving import eventually, serving
from jaxspec import LLM, InvalidRequest, SamplingParams
from jaxspec.engine.metrics import Counters, StepTimer
from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.sched.admission import SloAdmission, SloRefused
from jaxspec.sched.length.distribution import LengthDistribution
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.slo import NONE, Slo
from jaxspec.sched.timing import StepTimes
from jaxspec.serve.attainment import attainment

SETTINGS: dict[str, Any] = dict(
    draft=[], page_size=16, max_num_seqs=6, token_buckets=[1, 16], kv_cache_tokens=1024, max_num_batched_tokens=16,
    max_model_len=256, compilation_cache_dir="", pace="deadline",
    slo={"admission": "strict", "ttft_ms": 90_000, "categories": {"chat": {"tpot_ms": 5000}}},
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
PROMPT = [5, 6, 7]


class Fixed(StepTimes):
    """10 ms a token, whatever is measured."""

    def __init__(self) -> None:
        super().__init__({n: 0.01 * n for n in range(1, 17)})

    def observe(self, tokens: int, seconds: float, context: float = 0.0) -> None:
        pass


TIMES = Fixed()


def admission(strict: bool) -> SloAdmission:
    return SloAdmission(TIMES, LengthDistribution(), strict=strict, paced=True, max_num_seqs=6)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny.llm(**SETTINGS) as llm:
        yield llm


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine that takes its steps to be slow, so that it admits one request with a TPOT of 20 ms."""
    monkeypatch.setattr(llm.engine, "step_times", TIMES)
    monkeypatch.setattr(llm.engine, "_admission", admission(strict=True))
    return llm


# -- what is told ------------------------------------------------------------------------------------------------------


def answered(tokens: int, slo: Slo = NONE, first: float | None = 0.5, finished: float | None = 1.5) -> RequestMetrics:
    return RequestMetrics(0.0, first_token=first, finished=finished, output_tokens=tokens, slo=slo)


def test_slack_is_the_slo_minus_what_was_measured():
    missed = answered(5, Slo(tpot=0.2, ttft=0.75))
    assert (missed.tpot_slack, missed.ttft_slack) == (pytest.approx(-0.05), 0.25)
    assert (missed.tpot_attained, missed.ttft_attained) == (False, True)
    exact = answered(5, Slo(tpot=0.25, ttft=0.5))
    assert (exact.tpot_slack, exact.tpot_attained, exact.ttft_slack, exact.ttft_attained) == (0, True, 0, True)
    one = answered(1, Slo(tpot=0.001))
    assert (one.tpot_slack, one.tpot_attained, one.ttft_attained) == (None, True, None)
    for untold in (answered(5), answered(0, Slo(0.2, 0.2), None, None), answered(0, Slo(0.2, 0.2), None)):
        assert untold.tpot_slack is untold.ttft_slack is untold.tpot_attained is untold.ttft_attained is None


def test_of_several_answers_the_worst_counts():
    both = [answered(5, Slo(tpot=0.25)), answered(3, Slo(tpot=0.25))]
    assert attainment(both) == {
        "tpot_ms": 250.0, "ttft_ms": None, "tpot_attained": False, "ttft_attained": None,
        "tpot_slack_ms": -250.0, "ttft_slack_ms": None,
    }  # fmt: skip
    assert attainment([answered(1, Slo(tpot=0.25)), both[0]])["tpot_attained"] is True


# -- LLM ---------------------------------------------------------------------------------------------------------------


def test_slos_of_prompts_and_their_categories(llm: LLM):
    named = [None, {}, {"category": "chat"}, {"category": "chat", "tpot_ms": 7000, "ttft_ms": None}, {"tpot_ms": 6000}]
    outputs = llm.generate([PROMPT] * 5, GREEDY, slo=named)
    default = Slo(ttft=90.0)
    assert [o.metrics.slo for o in outputs] == [default, default, Slo(tpot=5.0), Slo(tpot=7.0), Slo(6.0, 90.0)]
    assert [o.metrics.tpot_attained for o in outputs] == [None, None, True, True, True]
    assert [o.metrics.ttft_attained for o in outputs] == [True, True, None, None, True]
    (one,) = llm.generate("x", GREEDY, slo={"category": "chat"})
    assert one.metrics.slo == Slo(tpot=5.0) and one.metrics.tpot_slack is not None and one.metrics.tpot_slack > 0
    check_clean(llm)
    assert not len(llm.engine._admission)


@pytest.mark.parametrize(
    ("slo", "field", "says"),
    [
        ({"tpot_ms": 0}, "slo.tpot_ms", "greater"),
        ({"tpot_ms": float("nan")}, "slo.tpot_ms", "finite"),
        ({"ttft_ms": "fast"}, "slo.ttft_ms", "number"),
        ({"tpot": 20}, "slo.tpot", "not permitted"),
        ({"category": "code"}, "slo.category", "'code' is unknown; known: chat$"),
        (20, "slo", "dictionary"),
        ("chat", "slo", "dictionary"),
        ([{}, {}], "slo", "2 slo for 1 prompts"),
        ({"tpot_ms": 4.9}, "slo.tpot_ms", "4.9 is impossible; by measured step times this engine needs about 5 ms"),
        ({"ttft_ms": 14}, "slo.ttft_ms", "14 is impossible; by measured step times this engine needs about 15 ms"),
    ],
)
def test_invalid_slos_are_refused(slow: LLM, slo: Any, field: str, says: str):
    with pytest.raises(InvalidRequest, match=says) as caught:
        slow.generate([PROMPT], GREEDY, slo=slo)
    assert caught.value.field == field
    assert slow.engine.stats().slo_refused == 0


def test_what_is_cached_need_not_be_computed(slow: LLM):
    prompt = list(range(100, 140))
    slow.engine.check(prompt, GREEDY, Slo(ttft=0.21))
    with pytest.raises(InvalidRequest, match=r"about 200 ms$"):
        slow.engine.check(prompt, GREEDY, Slo(ttft=0.19))
    slow.generate([prompt], GREEDY, slo={"category": "chat"})
    slow.engine.check(prompt, GREEDY, Slo(ttft=0.05))
    with pytest.raises(InvalidRequest, match=r"about 40 ms$"):
        slow.engine.check(prompt, GREEDY, Slo(ttft=0.03))


def test_the_default_slo_is_missed_without_a_refusal(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    settings = llm.engine.config.slo.model_copy(update={"tpot_ms": 0.002, "admission": "best_effort"})
    monkeypatch.setattr(llm.engine, "config", llm.engine.config.model_copy(update={"slo": settings}))
    monkeypatch.setattr(llm.engine, "_admission", admission(strict=False))
    (one,) = llm.generate([PROMPT], GREEDY)
    assert one.metrics.tpot_attained is False
    with pytest.raises(InvalidRequest, match="impossible"):
        llm.generate([PROMPT], GREEDY, slo={"tpot_ms": 0.001})


# -- admission ---------------------------------------------------------------------------------------------------------


class Running:
    """A request with an SLO, and its output."""

    def __init__(self, llm: LLM, params: SamplingParams = LONG, broken: bool = False) -> None:
        self._broken = broken
        self.deltas: list[OutputDelta] = []
        self.id = llm.engine.submit(PROMPT, params, self._take, slo=Slo(tpot=0.02))

    def _take(self, delta: OutputDelta) -> None:
        self.deltas.append(delta)
        if self._broken:
            raise OSError("nobody listens")

    @property
    def finish_reason(self) -> str | None:
        return self.deltas[-1].finish_reason if self.deltas else None


def test_admissions_end_with_their_requests(slow: LLM):
    admission = slow.engine._admission
    refused = 0
    for end in ("length", "abort", "broken"):
        running = Running(slow, broken=end == "broken")
        if end != "broken":
            with pytest.raises(SloRefused, match="together with 1 requests"):
                Running(slow)
            refused += 1
        if end == "abort":
            slow.engine.cancel(running.id)
        eventually(lambda r=running: r.finish_reason is not None)
        assert running.finish_reason == ("length" if end == "length" else "abort")
        assert len(admission) == 0
    assert slow.engine.stats().slo_refused == admission.refused == refused
    check_clean(slow)


def test_generate_raises_and_leaves_no_request(slow: LLM):
    with pytest.raises(SloRefused, match=r"slo\.tpot_ms: 20 cannot be met together with 1 requests"):
        slow.generate(
            [PROMPT], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, n=3), slo={"tpot_ms": 20}
        )
    eventually(lambda: not slow.engine._states)
    assert len(slow.engine._admission) == 0
    check_clean(slow)


def test_requests_without_slo_are_admitted(slow: LLM, monkeypatch: pytest.MonkeyPatch):
    settings = slow.engine.config.slo.model_copy(update={"ttft_ms": None})
    monkeypatch.setattr(slow.engine, "config", slow.engine.config.model_copy(update={"slo": settings}))
    Running(slow)
    assert [o.metrics.output_tokens for o in slow.generate([PROMPT] * 12, GREEDY)] == [4] * 12
    check_clean(slow)


@pytest.mark.parametrize("failing", [False, True])
def test_admissions_end_with_their_engine(failing: bool, monkeypatch: pytest.MonkeyPatch):
    with tiny.llm(**SETTINGS | {"token_buckets": [16], "max_num_seqs": 1}) as llm:
        made = llm.engine._admission = SloAdmission(
            TIMES, LengthDistribution(), strict=True, paced=True, max_num_seqs=6
        )
        llm.engine.step_times = TIMES
        running = Running(llm)
        assert len(made) == 1
        if failing:
            llm.engine.loop.recovery.most_restarts = 0
            monkeypatch.setattr(llm.engine.loop.model_runner, "pack", None)
            eventually(lambda: llm.engine.health == "dead")
        llm.close()
        eventually(lambda: running.finish_reason is not None)
        assert running.finish_reason == ("error" if failing else "abort") and len(made) == 0


def test_admission_goes_by_the_latest_steps() -> None:
    """Drafts that were made with less load do not count for long."""
    counters, timer = Counters(), StepTimer(count(0.0, 0.5).__next__)
    counters.add_times(timer, [RequestResult((1,))])
    assert counters.load.overhead == pytest.approx(0.5)  # what the host does last: two readings of the clock
    for _ in range(400):
        counters.speculation.add(4, 3)
        counters.speculation.add(2, 1)
        counters.add_times(timer, [RequestResult((1,) * 4), RequestResult((1,) * 2), RequestResult()])
    assert (counters.load.gain, counters.load.drafts) == (pytest.approx(3, rel=0.01), pytest.approx(3, rel=0.01))
    for _ in range(400):
        counters.add_times(timer, [RequestResult((1,))] * 8)
    assert (counters.load.gain, counters.load.drafts) == (pytest.approx(1, abs=0.02), pytest.approx(0, abs=0.02))


# -- the server --------------------------------------------------------------------------------------------------------


def test_the_server_says_why(slow: LLM):
    def ask(slo: dict[str, Any], prompt: Any = PROMPT) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "slo": slo}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)

    with serving(slow.engine) as url:
        for slo, field, least in (({"tpot_ms": 1}, "slo.tpot_ms", "5"), ({"ttft_ms": 1}, "slo.ttft_ms", "15")):
            answer = ask(slo)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
            assert f"this engine needs about {least} ms" in error["message"]
        refused = ask({"tpot_ms": 20}, [PROMPT, PROMPT])  # the first is taken back
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "slo_unattainable")
        assert error["param"] == "slo" and "slo.tpot_ms: 20 cannot be met together with 1 requests" in error["message"]
        assert refused.headers["retry-after"] == "1"
        eventually(lambda: len(slow.engine._admission) == 0)
        metrics = ask({"category": "chat"}).raise_for_status().json()["metrics"]
        assert metrics["slo"]["tpot_ms"] == 5000 and metrics["slo"]["tpot_attained"] is True
        assert 0 < metrics["slo"]["tpot_slack_ms"] < 5000
        told = httpx.get(f"{url}/metrics").text
    assert 'jaxspec:slo_refused_total{model_name="tiny"} 1.0' in told
    check_clean(slow)
