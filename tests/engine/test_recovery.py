"""After a failed step the engine goes on: no request loses or repeats a token, and one that is at fault ends alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from threading import Event
from typing import Any

import jax
import pytest

from helpers import tiny
from helpers.generation import GREEDY, check_clean
from helpers.patience import PATIENCE
from jaxspec import LLM, SamplingParams
from jaxspec.draft.suffix import SuffixDrafter
from jaxspec.engine.request_state import RequestState
from jaxspec.outputs import OutputDelta
from jaxspec.sched import Scheduler
from jaxspec.step.native import NativeLayers
from jaxspec.step.runner import ModelRunner, PendingStep

SETTINGS: dict[str, Any] = dict(
    page_size=16, max_num_seqs=4, token_buckets=[1, 16], kv_cache_tokens=160, max_num_batched_tokens=16,
    max_model_len=80, draft=["ngram", "truncated:1"], tree="chain", draft_depth=3,
)  # fmt: skip
TEXTS = [[5, 6 + i % 4, 7, 8] * 4 + [i] * 3 for i in range(6)]
EACH = [
    replace(GREEDY, max_tokens=14 + i, logprobs=1) if i % 2 == 0 else SamplingParams(
        temperature=0.9, seed=i, max_tokens=14 + i, ignore_eos=True, presence_penalty=0.7, repetition_penalty=1.2)
    for i in range(len(TEXTS))
]  # fmt: skip


@pytest.fixture(scope="module", params=["chains", "INT8 host pages", "asynchronous"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    own: dict[str, Any] = {
        "chains": {"memory": "recompute"},
        "INT8 host pages": {"memory": "swap", "swap_space": 0.001},
        "asynchronous": {"async_scheduling": True, "draft": "none", "order": "las", "las": {"quantum_ms": 0.0}},
    }[request.param]
    with pytest.MonkeyPatch.context() as patch:
        # As on GPUs (`jaxspec.step.addresses`): a failed step may lose outboxes.
        patch.setattr(NativeLayers, "steady", request.param == "asynchronous")
        with tiny.llm(**SETTINGS | own) as llm:
            llm.engine.loop.recovery.most_restarts = 1000
            yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[list[int], int]]:
    """Tokens and number of log-probabilities of each request, served alone."""
    outputs = [llm.generate([text], [p])[0].outputs[0] for text, p in zip(TEXTS, EACH, strict=True)]
    return [(o.token_ids, len(o.logprobs or ())) for o in outputs]


class Crowd:
    """All requests at once: what each has got, and its last delta."""

    def __init__(self, llm: LLM, texts: list[list[int]] = TEXTS) -> None:
        self.tokens: list[list[int]] = [[] for _ in texts]
        self.logprobs = [0] * len(texts)
        self.last: list[OutputDelta | None] = [None] * len(texts)
        ends = [Event() for _ in texts]

        def take(i: int, delta: OutputDelta) -> None:
            assert self.last[i] is None, "output after the last one"
            self.tokens[i] += delta.token_ids
            self.logprobs[i] += len(delta.logprobs)
            if delta.finish_reason is not None:
                self.last[i] = delta
                ends[i].set()

        for i, text in enumerate(texts):
            llm.engine.submit(text, EACH[i], lambda delta, i=i: take(i, delta), request_id=f"request {i}")
        assert all(end.wait(PATIENCE) for end in ends)

    @property
    def got(self) -> list[tuple[list[int], int]]:
        return list(zip(self.tokens, self.logprobs, strict=True))

    @property
    def reasons(self) -> list[str | None]:
        return [delta and delta.finish_reason for delta in self.last]


def lose_pool(runner: ModelRunner) -> None:
    """As after a program that failed when it had taken the donated pool."""
    for leaf in jax.tree.leaves(runner.kv_cache):
        leaf.delete()


Fault = Callable[[LLM, pytest.MonkeyPatch, Callable[[], bool]], None]


def before_launch(llm: LLM, patch: pytest.MonkeyPatch, now: Callable[[], bool]) -> None:
    execute = llm.engine.loop.model_runner.execute

    def failing(*args: Any) -> PendingStep:
        if now():
            raise MemoryError
        return execute(*args)

    patch.setattr(llm.engine.loop.model_runner, "execute", failing)


def with_the_pool(llm: LLM, patch: pytest.MonkeyPatch, now: Callable[[], bool]) -> None:
    runner = llm.engine.loop.model_runner
    execute = runner.execute

    def failing(*args: Any) -> PendingStep:
        if now():
            lose_pool(runner)
            raise RuntimeError("pool lost")
        return execute(*args)

    patch.setattr(runner, "execute", failing)


def on_reading(llm: LLM, patch: pytest.MonkeyPatch, now: Callable[[], bool]) -> None:
    wait = PendingStep.wait

    def failing(self: PendingStep) -> Any:
        found = wait(self)
        if now():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")
        return found

    patch.setattr(PendingStep, "wait", failing)


def after_the_tokens(llm: LLM, patch: pytest.MonkeyPatch, now: Callable[[], bool]) -> None:
    """Requests have got their tokens, the scheduler does not know them."""
    update = Scheduler.update

    def failing(self: Scheduler, *args: Any) -> None:
        if now():
            raise RuntimeError("no update")
        update(self, *args)

    patch.setattr(Scheduler, "update", failing)


def in_planning(llm: LLM, patch: pytest.MonkeyPatch, now: Callable[[], bool]) -> None:
    """Pages have been taken for a plan that nobody gets."""
    plan = Scheduler.plan

    def failing(self: Scheduler, *args: Any) -> Any:
        made = plan(self, *args)
        if now():
            raise RuntimeError("no plan")
        return made

    patch.setattr(Scheduler, "plan", failing)


@pytest.mark.parametrize("fault", [before_launch, with_the_pool, on_reading, after_the_tokens, in_planning])
def test_nobody_notices_a_failed_step(
    llm: LLM, alone: list[tuple[list[int], int]], fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, engine = Random(3), llm.engine
    failed, since = [0], [0]

    def now() -> bool:
        since[0] += 1
        fails = random.random() < 0.3 and since[0] > 8  # a request that never gets a token in between would be blamed
        failed[0] += fails
        since[0] *= not fails
        return fails

    before = engine.stats()
    fault(llm, monkeypatch, now)
    for _ in range(3):
        crowd = Crowd(llm)
        assert crowd.got == alone and crowd.reasons == ["length"] * len(TEXTS)
        check_clean(llm)
    after = engine.stats()
    assert failed[0] > 2 and after.restarts - before.restarts == failed[0]
    assert after.compilations_after_warmup == before.compilations_after_warmup and engine.health == "ok"


def test_a_request_that_breaks_every_step_ends_alone(
    llm: LLM, alone: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = RequestState.tree

    def failing(self: RequestState, *args: Any) -> Any:
        if self.request.id == "request 2" and self.request.output_len >= 5:
            raise RuntimeError("a poisonous prompt")
        return tree(self, *args)

    monkeypatch.setattr(RequestState, "tree", failing)
    monkeypatch.setattr(RequestState, "draft_tree", failing)
    crowd = Crowd(llm)
    assert crowd.reasons == ["length", "length", "error", "length", "length", "length"]
    assert crowd.got[:2] + crowd.got[3:] == alone[:2] + alone[3:]
    assert crowd.tokens[2] == alone[2][0][: len(crowd.tokens[2])] and len(crowd.tokens[2]) >= 5
    last = crowd.last[2]
    assert last is not None and last.error is not None and "poisonous" in last.error
    check_clean(llm)


@pytest.mark.parametrize(("what", "at_the_end"), [("append", False), ("_decode", False), ("_decode", True)])
def test_a_result_that_cannot_be_processed_ends_its_request(
    llm: LLM, alone: list[tuple[list[int], int]], what: str, at_the_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(RequestState, what)

    def failing(self: RequestState, *args: Any) -> Any:
        due = self.finish_reason is not None if at_the_end else self.request.output_len >= 3
        if self.request.id == "request 1" and due:
            raise ValueError("a token without text")
        return original(self, *args)

    before = llm.engine.stats().restarts
    monkeypatch.setattr(RequestState, what, failing)
    crowd = Crowd(llm)
    assert crowd.reasons == ["length", "error", "length", "length", "length", "length"]
    assert crowd.got[:1] + crowd.got[2:] == alone[:1] + alone[2:]
    check_clean(llm)
    assert llm.engine.stats().restarts == before


@pytest.mark.slow
def test_a_drafter_that_fails_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.llm(**SETTINGS | {"memory": "swap", "swap_space": 0.001}) as llm:
        expected = Crowd(llm).got
        assert llm.engine.stats().draft_tokens > 0

        def failing(*_: Any) -> Any:
            raise RuntimeError("no idea")

        monkeypatch.setattr(SuffixDrafter, "propose", failing)
        assert Crowd(llm).got == expected
        assert llm.engine.stats().restarts == 3
        assert [drafter.ready for drafter in llm.engine.speculator.drafters] == [False, True]
        before = llm.engine.stats().draft_tokens
        assert Crowd(llm).got == expected and llm.engine.stats().draft_tokens > before  # the other one drafts on
        check_clean(llm)


def test_requests_that_arrive_during_a_trial_wait_for_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They, too, end exactly once, also where they are cancelled while they wait."""
    plan, ended = Scheduler.plan, dict[str, str | None]()
    failures = [0]

    def take(delta: OutputDelta) -> None:
        if delta.finish_reason is not None:
            ended[delta.request_id] = delta.finish_reason

    def failing(self: Scheduler, *args: Any) -> Any:
        made = plan(self, *args)
        if failures[0] < 2 and made.scheduled:
            failures[0] += 1
            if failures[0] == 2:  # the next step is a trial; these come before it
                for name in ("late", "cancelled"):
                    llm.engine.submit(TEXTS[0], EACH[0], take, request_id=name)
            raise RuntimeError("twice")
        return made

    monkeypatch.setattr(Scheduler, "plan", failing)
    begun = llm.engine.loop.recovery.keep_back

    def hold(state: RequestState) -> bool:
        held = begun(state)
        if state.request.id == "cancelled":
            assert held and llm.engine.stats().waiting
            llm.engine.cancel("cancelled")
        return held

    monkeypatch.setattr(llm.engine.loop.recovery, "keep_back", hold)
    assert Crowd(llm).reasons == ["length"] * len(TEXTS)
    deadline = time.monotonic() + PATIENCE
    while len(ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == {"late": "length", "cancelled": "abort"}
    check_clean(llm)


def test_requests_kept_back_survive_a_failed_restart(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart after a trial fails; those that have arrived meanwhile are still served."""
    plan, reset = Scheduler.plan, ModelRunner.reset
    failures, ended = [0], dict[str, str | None]()

    def take(delta: OutputDelta) -> None:
        if delta.finish_reason is not None:
            ended[delta.request_id] = delta.finish_reason

    def failing_plan(self: Scheduler, *args: Any) -> Any:
        made = plan(self, *args)
        if failures[0] < 2 and made.scheduled:
            failures[0] += 1
            if failures[0] == 2:
                llm.engine.submit(TEXTS[0], EACH[0], take, request_id="late")
            raise RuntimeError("twice")
        return made

    resets = [0]

    def failing_reset(self: ModelRunner) -> None:
        resets[0] += failures[0] == 2
        if resets[0] == 2:  # the first one begins the trial
            raise MemoryError("no room")
        reset(self)

    monkeypatch.setattr(Scheduler, "plan", failing_plan)
    monkeypatch.setattr(ModelRunner, "reset", failing_reset)
    assert Crowd(llm).reasons == ["length"] * len(TEXTS)
    deadline = time.monotonic() + PATIENCE
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == {"late": "length"} and resets[0] > 2
    check_clean(llm)


def test_a_failure_while_idle_restarts_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt, failed = llm.engine.warm_up.adopt_ready, [0]

    def failing(*args: Any, **kw: Any) -> float:
        if not failed[0]:
            failed[0] = 1
            raise RuntimeError("a program that cannot run")
        return adopt(*args, **kw)

    before = llm.engine.stats().restarts
    monkeypatch.setattr(llm.engine.warm_up, "adopt_ready", failing)
    assert Crowd(llm).reasons == ["length"] * len(TEXTS)
    assert llm.engine.stats().restarts == before + 1 and llm.engine.health == "ok"


def test_submitting_during_restarts_is_safe(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come from another thread while every few steps fail."""
    execute, steps, ended = llm.engine.loop.model_runner.execute, [0], list[str | None]()

    def failing(*args: Any) -> PendingStep:
        steps[0] += 1
        if steps[0] % 12 == 0:
            raise RuntimeError("now and then")
        return execute(*args)

    def take(delta: OutputDelta) -> None:
        if delta.finish_reason is not None:
            ended.append(delta.finish_reason)

    monkeypatch.setattr(llm.engine.loop.model_runner, "execute", failing)
    for i in range(100):
        llm.engine.submit([i, 2], replace(GREEDY, max_tokens=3), take)
    deadline = time.monotonic() + PATIENCE
    while len(ended) < 100 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == ["length"] * 100 and steps[0] > 12 and llm.engine.health == "ok"
    check_clean(llm)


def test_a_panic_of_a_library_answers_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The panic of Rust code is no `Exception`, so the engine does not restart; but no client may wait for ever."""

    class Panic(BaseException):
        pass

    def panics() -> None:
        raise Panic("index out of bounds")

    with tiny.llm(**SETTINGS) as llm:
        monkeypatch.setattr(llm.engine.loop, "step", panics)
        crowd = Crowd(llm)
        assert set(crowd.reasons) == {"error"} and llm.engine.health == "dead"
