"""Serving starts with a few programs; others are compiled in the background, and no request waits for a compilation."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers import tiny
from jaxspec import SamplingParams
from jaxspec.llm import LLM
from jaxspec.step.profiles import Profile
from jaxspec.step.warmup import CompileJob, WarmUp

SETTINGS: dict[str, Any] = dict(
    page_size=16, max_num_seqs=4, max_num_batched_tokens=96, kv_cache_tokens=2048, max_model_len=128,
    token_buckets=[1, 4, 16, 64, 96],
    draft=["truncated:1"], swap_space=0,
)  # fmt: skip
PROMPTS = [[5, 6, 7, 5, 6, 7], list(range(40)), [9] * 30, [1, 2]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The background thread begins only when this is set."""
    gate, run = threading.Event(), WarmUp._run

    def wait(self: WarmUp) -> None:
        while not gate.wait(0.05) and not self._closing.is_set():
            pass
        run(self)

    monkeypatch.setattr(WarmUp, "_run", wait)
    yield gate
    gate.set()


def plain() -> list[list[int]]:
    return [tiny.greedy(prompt, 24) for prompt in PROMPTS]


@pytest.mark.slow
def test_it_serves_before_all_is_compiled_and_drafts_after(held: threading.Event) -> None:
    """Same tokens with three step sizes and no drafter, while programs arrive, and with all of them."""
    with tiny.llm(compile_in_background=True, **SETTINGS) as llm:
        engine, expected = llm.engine, plain()
        engine.loop.model_runner.startup_done()  # `plain` compiles, too
        before = engine.stats()
        assert [s.tokens for s in engine.loop.model_runner.ready] == [1, 64, 96] == engine.step_times.sizes
        assert 0 < before.programs_ready < before.programs_total
        assert answers(llm) == expected and not engine.warm_up.wait(0)
        assert engine.stats().draft_tokens == engine.stats().compilations_after_warmup == 0
        held.set()
        for _ in range(200):  # programs are adopted between steps, and measured when there are none
            assert answers(llm) == expected
            if engine.warm_up.wait(0.6):
                break
        after = engine.stats()
        assert after.programs_ready == after.programs_total and after.compilations_after_warmup == 0
        assert engine.loop.model_runner.ready == engine.loop.model_runner.shapes
        assert engine.step_times.sizes == [s.tokens for s in engine.loop.model_runner.shapes]
        assert all(profile.measured for profile in engine.profiled)
        assert answers(llm) == expected and engine.stats().compilations_after_warmup == 0
        model = engine.speculator.drafters[0]
        assert model.ready and model.seconds(1, 1, 1, 1) > 0


def answers(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)]


def test_an_engine_that_is_closed_does_not_wait_for_the_rest(held: threading.Event) -> None:
    llm = tiny.llm(compile_in_background=True, **SETTINGS)
    llm.close()
    assert not llm.engine.warm_up.wait(0)
    assert "jaxspec-warm-up" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_with_a_choice_of_drafters_all_of_them_are_there_at_once() -> None:
    """Who drafts for whom is chosen by what each takes."""
    settings = SETTINGS | dict(token_buckets=[8], draft_choice="lbss", max_num_batched_tokens=8)
    with tiny.llm(compile_in_background=True, **settings) as llm:
        speculator = llm.engine.speculator
        assert speculator.drafters[0].ready


# -- the order of things, without an engine ------------------------------------------------------------------------


def started(warm_up: WarmUp, busy: bool = False) -> None:
    warm_up.start(lambda: busy, lambda: None)
    if warm_up._thread:
        warm_up._thread.join(20)
        assert not warm_up._thread.is_alive()


def test_lower_ranks_come_first_and_a_failure_is_not_the_others(caplog: pytest.LogCaptureFixture) -> None:
    order: list[str] = []
    warm_up = WarmUp(background=True)

    def job(name: str) -> CompileJob:
        def compile() -> str:
            if name == "broken":
                raise RuntimeError("no")
            return name

        return CompileJob(name, compile, order.append, failed=lambda: order.append(f"not {name}"))

    warm_up.compile_now("stage", [job("first")])
    warm_up.compile_later("stage", [job("c"), job("d")], rank=2)
    warm_up.compile_later("stage", [job("a"), job("broken"), job("b")], rank=1)
    started(warm_up)
    assert order == ["first"], "the engine's thread adopts"
    warm_up.adopt_ready(busy=False)
    assert order == ["first", "a", "not broken", "b", "c", "d"]
    assert (warm_up.ready, warm_up.total) == (5, 6) and warm_up.wait(0)
    assert "broken could not be compiled" in caplog.text


def test_without_a_background_later_is_now() -> None:
    order: list[str] = []
    warm_up = WarmUp()
    warm_up.compile_later("stage", [CompileJob("a", lambda: "a", order.append)])
    started(warm_up)
    assert order == ["a"] and warm_up.wait(0) and warm_up._thread is None


def two_programs(clock: Clock) -> tuple[WarmUp, Profile, list[str]]:
    """A program with a guess of its time and one without, which takes a second; and the runs so far."""
    runs: list[str] = []
    profile = Profile("step", ["guessed", "new"], clock=clock)

    def run(name: str) -> Callable[[], None]:
        def once() -> None:
            runs.append(name)
            clock.now += 1.0

        return once

    warm_up = WarmUp(True, clock=clock)
    for name, guess in (("guessed", 1.0), ("new", None)):
        warm_up.compile_later("", [CompileJob(name, lambda: 0, lambda _, n=name, g=guess: profile.offer(n, run(n), g))])
    warm_up.measure(profile)
    started(warm_up)
    return warm_up, profile, runs


def test_an_idle_engine_measures_after_a_while() -> None:
    clock = Clock()
    warm_up, profile, runs = two_programs(clock)
    assert warm_up.adopt_ready(busy=False) == pytest.approx(0.5) and not runs
    clock.now += 0.6
    assert warm_up.adopt_ready(busy=False) == 0.0 and runs == ["new"], "one without any time comes first"
    for _ in range(20):
        if warm_up.wait(0):
            break
        before = len(runs)
        warm_up.adopt_ready(busy=False)
        assert len(runs) <= before + 1, "requests are looked for after each run"
    assert profile.measured is not None and warm_up.adopt_ready(busy=False) == float("inf")


def test_while_requests_run_only_programs_without_a_time_are_measured_and_rarely() -> None:
    clock = Clock()
    warm_up, profile, runs = two_programs(clock)
    assert warm_up.adopt_ready(busy=True) == float("inf")
    assert runs == ["new"] and profile.seconds == {"guessed": 1.0, "new": 1.0}
    profile.offer("third", lambda: runs.append("third"))
    clock.now += 19.0
    warm_up.adopt_ready(busy=True)
    assert runs == ["new"]
    clock.now += 2.0
    warm_up.adopt_ready(busy=True)
    assert runs == ["new", "third"] and profile.measured is None


def test_while_requests_run_the_background_sleeps_longer_than_it_works() -> None:
    """Bounded in both ways: it works for a fifth of the time, and it goes on."""
    begun: list[float] = []

    def work() -> None:
        begun.append(time.monotonic())
        time.sleep(0.1)

    warm_up = WarmUp(background=True)
    warm_up.compile_later("stage", [CompileJob(str(i), work) for i in range(3)])
    started(warm_up, busy=True)
    gaps = [b - a for a, b in itertools.pairwise(begun)]
    assert len(begun) == 3 and min(gaps) >= 0.1 + 4 * 0.1 - 0.01
