"""Planning a step while the one before runs, with drafts too: the same tokens, and the host's time hidden."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tiny
from helpers.generation import GREEDY, check_clean, params, prompts, tokens_of
from helpers.patience import PATIENCE
from helpers.tiny_drafters import conditioned, perfect
from jaxspec import LLM, SamplingParams
from jaxspec.draft import registry as drafters
from jaxspec.draft.round import Drafted
from jaxspec.draft.runner import DraftRunner
from jaxspec.engine.metrics import Counters, StepTimer
from jaxspec.errors import EngineDead
from jaxspec.outputs import OutputDelta
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.spec.drafter import FailedDrafter
from jaxspec.sched.spec.speculator import MOST_FAILURES
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import Packed
from jaxspec.step.runner import ModelRunner, PendingStep

COMMON: dict[str, Any] = dict(page_size=16, max_num_seqs=4, token_buckets=[4, 32], compilation_cache_dir="")
ROOMY: dict[str, Any] = dict(kv_cache_tokens=2048, max_num_batched_tokens=32, max_model_len=128, draft=[])
#: Room for little more than one long request.
TIGHT: dict[str, Any] = ROOMY | dict(kv_cache_tokens=96, max_num_batched_tokens=12, max_model_len=72)
#: Only chains of a draft model on the target's device, so that no step waits for the host to read drafts.
AHEAD_OF: dict[str, Any] = dict(draft=["truncated:1"], tree="chain", draft_depth=3)
AHEAD: dict[str, Any] = ROOMY | AHEAD_OF
KINDS: dict[str, dict[str, Any]] = {
    "roomy": ROOMY,
    "preempting": TIGHT | dict(memory="recompute"),
    "pausing and swapping": TIGHT | dict(order="las", las={"quantum_ms": 0.0}, memory="swap", swap_space=0.01),
    "drafting": ROOMY | dict(draft=["suffix", "truncated:1"], tree="chain", draft_depth=3),
    "drafting ahead": AHEAD,
    "drafting ahead, always right": AHEAD | dict(load=perfect),
    "drafting ahead from features": AHEAD | dict(load=conditioned, draft_depth=8, steady=True),
    "drafting ahead, preempting": TIGHT | AHEAD_OF | dict(load=perfect, memory="recompute"),
    "drafting ahead, pausing and swapping": (
        TIGHT
        | AHEAD_OF
        | dict(load=perfect, order="las", las={"quantum_ms": 0.0}, memory="swap", swap_space=0.01, steady=True)
    ),
    "drafting ahead where it pays": ROOMY | AHEAD_OF | dict(tree="auto"),
    "drafting where it pays": ROOMY | dict(draft=["suffix", "truncated:1"]),
    "INT8 pages": ROOMY | dict(kv_cache_dtype="int8"),
}
FAST = {"roomy", "preempting", "drafting ahead"}
LONG = replace(GREEDY, max_tokens=60)


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[] if kind in FAST else pytest.mark.slow) for kind in KINDS],
)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """An engine of this kind, and one that decodes plainly with the same KV."""
    kind = KINDS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        if load := kind.get("load"):
            patch.setattr(drafters, "load", lambda name, target: load(target))
        # As on GPUs (`jaxspec.step.addresses`).
        patch.setattr(NativeLayers, "steady", kind.get("steady", False))
        yield from started(kind)


def started(kind: dict[str, Any]) -> Iterator[tuple[LLM, LLM]]:
    kind = {name: value for name, value in kind.items() if name not in {"load", "steady"}}
    alone = ROOMY | {name: kind[name] for name in ("kv_cache_dtype",) if name in kind}
    with tiny.llm(**COMMON | alone) as plain, tiny.llm(**COMMON | kind, async_scheduling=True) as llm:
        yield llm, plain


def assert_same_tokens(llm: LLM, plain: LLM, texts: list[list[int]], each: list[SamplingParams]) -> None:
    assert [tokens_of(o) for o in llm.generate(texts, each)] == [tokens_of(o) for o in plain.generate(texts, each)]
    check_clean(llm)


def test_the_same_tokens(engines: tuple[LLM, LLM]) -> None:
    """With requests that the host need not see a token of, and others among them."""
    llm, plain = engines
    texts = [[3 * i, 7, 7 + i, 7] * 3 for i in range(6)]
    written = tokens_of(plain.generate([texts[1]], GREEDY)[0])
    each = [
        GREEDY,
        replace(GREEDY, stop_token_ids=[written[6]]),
        replace(GREEDY, temperature=0.9, seed=4, max_tokens=1),
        replace(GREEDY, temperature=0.9, seed=5, logprobs=2, max_tokens=20),
        replace(GREEDY, repetition_penalty=1.3, max_tokens=9),
        replace(GREEDY, allowed_token_ids=[5, 6, 7], max_tokens=7),
    ]
    before = llm.engine.stats()
    assert_same_tokens(llm, plain, texts, each)
    after = llm.engine.stats()
    assert after.compilations_after_warmup == before.compilations_after_warmup
    assert after.generation_tokens - before.generation_tokens == sum(
        len(tokens_of(o)) for o in plain.generate(texts, each)
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_the_same_tokens_for_any_requests(engines: tuple[LLM, LLM], data: Any) -> None:
    llm, plain = engines
    if llm.engine.config.kv_cache_dtype == "int8":
        return  # pages hold other roundings in another batch
    texts = [t[:40] for t in data.draw(st.lists(prompts, min_size=1, max_size=6))]
    assert_same_tokens(llm, plain, texts, [data.draw(params) for _ in texts])


def test_a_cancelled_request_ends_while_its_step_runs() -> None:
    with tiny.llm(**COMMON | ROOMY, async_scheduling=True) as llm:
        ends, gone, ids = [threading.Event() for _ in range(3)], dict[int, OutputDelta](), list[str]()

        def take(i: int, delta: OutputDelta) -> None:
            if i == 1 and delta.finish_reason is None:
                llm.engine.cancel(ids[1])
            if delta.finish_reason is not None:
                gone[i] = delta
                ends[i].set()

        ids += [f"request {i}" for i in range(3)]
        for i, name in enumerate(ids):
            llm.engine.submit([i + 1, 5, 9], LONG, lambda d, i=i: take(i, d), request_id=name)
        assert all(end.wait(PATIENCE) for end in ends)
        assert [gone[i].finish_reason for i in range(3)] == ["length", "abort", "length"]
        check_clean(llm)


def test_a_failing_step_that_may_not_restart_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.llm(**COMMON | ROOMY, async_scheduling=True) as llm:
        ended, errors, gate = threading.Event(), list[str | None](), threading.Event()

        def wait(_: PendingStep) -> Any:
            gate.wait(PATIENCE)
            raise RuntimeError("the device caught fire")

        def take(delta: OutputDelta) -> None:
            if delta.finish_reason is not None:
                errors.append(delta.error)
                if len(errors) == 2:
                    ended.set()

        monkeypatch.setattr(PendingStep, "wait", wait)
        llm.engine.loop.recovery.most_restarts = 0
        for i in range(2):
            llm.engine.submit([i + 1, 5, 9], LONG, take)
        gate.set()  # only now, so that the second request is not refused by a dead engine
        assert ended.wait(PATIENCE)
        assert all("the device caught fire" in (error or "") for error in errors)
        with pytest.raises(EngineDead):
            llm.engine.submit([1], LONG, take)


class Device:
    """A device that takes `step` seconds a step and `round` seconds a draft round, and a host that takes `host` seconds
    to plan a step, on a clock of their own. Tokens are computed by the real one."""

    def __init__(self, step: float, host: float, round: float = 0.0) -> None:
        self.now, self._free, self._step, self._host, self._round = 0.0, 0.0, step, host, round
        self.steps = 0

    def _runs(self, seconds: float, read: Callable[[], Any]) -> Callable[[], Any]:
        """The device has work for `seconds`. -> `read`, after it is done."""
        self._free = ready = max(self.now, self._free) + seconds

        def wait() -> Any:
            self.now = max(self.now, ready)
            return read()

        return wait

    def attach(self, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        runner, scheduler = llm.engine.loop.model_runner, llm.engine.loop.scheduler
        monkeypatch.setattr(llm.engine.loop, "_clock", lambda: self.now)
        plan: Callable[..., Any] = scheduler.plan

        def planned(*args: Any) -> Any:
            self.now += self._host
            return plan(*args)

        def execute(packed: Packed, before: PendingStep | None = None, chains: Any = None) -> PendingStep:
            pending = ModelRunner.execute(runner, packed, before, chains)
            self.steps += 1
            monkeypatch.setattr(pending, "wait", self._runs(self._step, pending.wait))
            return pending

        def start(of: DraftRunner, *args: Any) -> Any:
            return self._runs(self._round, real_start(of, *args))

        def start_ahead(of: DraftRunner, *args: Any) -> Any:
            chains, read = real_start_ahead(of, *args)
            return chains, self._runs(self._round, read)

        real_start, real_start_ahead = DraftRunner.start, DraftRunner.start_ahead
        monkeypatch.setattr(DraftRunner, "start", start)
        monkeypatch.setattr(DraftRunner, "start_ahead", start_ahead)
        monkeypatch.setattr(scheduler, "plan", planned)
        monkeypatch.setattr(runner, "execute", execute)


@pytest.mark.parametrize(("host", "step"), [(3.0, 10.0), (10.0, 3.0), (5.0, 5.0)])
def test_host_and_device_work_at_the_same_time(host: float, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the longer of both times, and their sum without async scheduling."""
    took: dict[bool, float] = {}
    for ahead in (False, True):
        device = Device(step, host)
        with tiny.llm(**COMMON | ROOMY, async_scheduling=ahead) as llm:
            with monkeypatch.context() as patch:
                device.attach(patch, llm)
                out = llm.generate([[1, 2, 3]], replace(GREEDY, max_tokens=41))[0]
            assert tokens_of(out) == tiny.greedy([1, 2, 3], 41)
        took[ahead] = device.now
    assert took[False] == pytest.approx(41 * (host + step), rel=0.05)
    assert took[True] == pytest.approx(41 * max(host, step), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("host", "step", "round"), [(3.0, 8.0, 2.0), (10.0, 3.0, 2.0), (5.0, 3.0, 2.0)])
def test_drafting_does_not_wait_for_the_host_either(
    host: float, step: float, round: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft round and step follow one another on the device while the host plans the next ones."""
    monkeypatch.setattr(drafters, "load", lambda name, target: perfect(target))
    took: dict[bool, float] = {}
    for ahead in (False, True):
        device = Device(step, host, round)
        with tiny.llm(**COMMON | AHEAD, async_scheduling=ahead) as llm:
            with monkeypatch.context() as patch:
                device.attach(patch, llm)
                out = llm.generate([[1, 2, 3]], replace(GREEDY, max_tokens=81))[0]
            assert tokens_of(out) == tiny.greedy([1, 2, 3], 81)
            assert llm.engine.stats().accepted_tokens == 60
            check_clean(llm)
        assert device.steps == 21  # the prompt, and four tokens a step
        took[ahead] = device.now
    assert took[False] == pytest.approx(20 * (host + round + step), rel=0.1)
    assert took[True] == pytest.approx(20 * max(host, round + step), rel=0.15)


def test_steps_with_drafts_follow_one_another_unless_the_host_needs_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A perfect drafter stays perfect, which it would not be with a token missing or wrong in its KV."""
    monkeypatch.setattr(drafters, "load", lambda name, target: perfect(target))
    with tiny.llm(**COMMON | AHEAD, async_scheduling=True) as llm:
        launcher, followed, waited = llm.engine.loop.launcher, 0, 0
        launch = launcher.launch

        def launched(step: Any, before: Any, in_turns: bool) -> None:
            nonlocal followed, waited
            launch(step, before, in_turns)
            drafted = bool(step.batches[0].drafts)
            followed, waited = followed + (drafted and before is not None), waited + (drafted and before is None)

        monkeypatch.setattr(launcher, "launch", launched)
        texts = [[3 * i, 7, 7 + i, 7] * 3 for i in range(4)]
        each = [LONG, LONG, replace(GREEDY, repetition_penalty=1.3, max_tokens=9), LONG]
        outs = llm.generate(texts, each)
        assert [tokens_of(outs[i]) for i in (0, 1, 3)] == [tiny.greedy(texts[i], 60) for i in (0, 1, 3)]
        for i in (0, 1, 3):
            counts = outs[i].metrics.speculation
            assert counts.accepted > 30
            assert counts.proposed - counts.accepted <= 3, "more than the drafts after its last token"
        assert followed > 5 and waited > 2


def test_requests_share_what_a_step_has_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve requests with one draft each in a step of 32 tokens: a round computes two or three tokens of each."""
    monkeypatch.setattr(drafters, "load", lambda name, target: perfect(target))
    crowd = COMMON | AHEAD | dict(max_num_seqs=12, token_buckets=[32], kv_cache_tokens=4096, draft_depth=8)
    with tiny.llm(**crowd, async_scheduling=True) as llm:
        outs = llm.generate([[i, 7, 9] for i in range(12)], LONG)
        accepted = [out.metrics.speculation.accepted for out in outs]
        assert min(accepted) > 20 and max(accepted) - min(accepted) <= 6, accepted


def test_rounds_that_only_catch_up_with_a_prompt_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without chains do not count as drafts of which none was verified, after which drafting would stop."""
    monkeypatch.setattr(drafters, "load", lambda name, target: perfect(target))
    small = AHEAD | dict(max_num_batched_tokens=16, token_buckets=[4, 16])
    with tiny.llm(**COMMON | small, async_scheduling=True) as llm:
        (controller,) = llm.engine.speculator.controllers
        counted = list[bool]()
        monkeypatch.setattr(controller, "count_round", counted.append)
        out = llm.generate([[i % 250 for i in range(80)]], replace(GREEDY, max_tokens=40))[0]
        assert out.metrics.speculation.accepted > 15 and counted and all(counted)


def test_a_round_that_fails_on_the_device_is_the_drafters_fault() -> None:
    """Its step fails with it. The requests go on, in the end without the drafter."""

    def broken(_: Any) -> Any:
        raise RuntimeError("the round failed")

    @jax.jit
    def poisoned(x: jax.Array) -> jax.Array:
        return jax.pure_callback(broken, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    run, fails = DraftRunner._run, False

    def failing(*args: Any, **more: Any) -> Any:
        out = run(*args, **more)
        return Drafted(*map(poisoned, out)) if fails else out

    with pytest.MonkeyPatch.context() as patch, tiny.llm(**COMMON | AHEAD, async_scheduling=True) as llm:
        patch.setattr(DraftRunner, "_run", failing)
        fails = True
        outs = llm.generate([[1, 2, 3], [4, 5, 6]], LONG)
        assert [tokens_of(out) for out in outs] == [tiny.greedy(p, 60) for p in ([1, 2, 3], [4, 5, 6])]
        assert llm.engine.stats().restarts == MOST_FAILURES
        (drafter,) = llm.engine.speculator.drafters
        assert isinstance(drafter, FailedDrafter)
        check_clean(llm)


def test_the_time_of_a_round_counts_for_admission_although_the_host_does_not_wait() -> None:
    now = 1.0
    timer, counters = StepTimer(lambda: now), Counters()
    now = 5.0
    timer.mark_launched(1)
    timer.mark_read()
    counters.add_times(timer, [RequestResult((1, 2))], ahead=0.75)
    assert counters.load.overhead == 0.75 and counters.host_seconds == 4.0
