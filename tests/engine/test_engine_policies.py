"""The engine under each policy: who goes first changes when a request is served, never what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from helpers import tiny
from helpers.generation import GREEDY, check_clean, tokens_of
from helpers.paths import CONFIGS
from helpers.patience import PATIENCE
from jaxspec import LLM, InvalidRequest, SamplingParams
from jaxspec.config import EngineConfig
from jaxspec.outputs import OutputDelta
from jaxspec.sched import Scheduler
from jaxspec.sched.slo import Slo
from jaxspec.sched.slots import ORDERS, PREDICTORS

#: Orders that pause requests in these workloads. A new one need not.
PAUSING = ("las", "laps_sd", "priority")
#: A pool for little more than one long request, and service so short that turns are taken. What is lost is
#: recomputed; test_engine_swap has the other way.
TIGHT: dict[str, Any] = dict(
    page_size=16, max_num_seqs=3, token_buckets=[1, 16], kv_cache_tokens=80,
    max_num_batched_tokens=12, max_model_len=72, memory="recompute", draft="suffix", tree="chain", draft_depth=3,
    las={"quantum_ms": 0.0}, laps_sd={"first_threshold_ms": 0.5, "window": 12, "queues": 8},
)  # fmt: skip
#: Text that repeats itself, and a share of it that is common. The model does not go on to repeat it: drafts that are
#: accepted come from earlier answers.
TEXTS = [[5, 6 + i % 4, 7, 8] * 4 + [i] * 3 for i in range(8)]
LENGTHS = [30, 28, 17, 30, 26, 28, 16, 29]


def schedules(preset: Path) -> str:
    """What a preset says about scheduling, apart from drafts, memory and predictor, which the tests set."""
    config = EngineConfig.load(preset)
    tests = {"predictor", "predictor_noise", "memory", "tree", "draft_depth", "draft_choice", "max_batch_size"}
    return repr(config.policy.model_dump(exclude=tests | {"slo", "aging_ms"}))


#: A preset for each way to schedule: a new one is tested without an edit here.
PRESETS = sorted({schedules(path): path.stem for path in sorted(CONFIGS.glob("*.yaml"), reverse=True)}.values())
#: SLOs of requests in turn: some that cannot be met, some that are tight now and then, and none.
SLOS = (Slo(tpot=2e-3), Slo(tpot=0.01), Slo(), Slo(tpot=0.02, ttft=0.1), Slo(tpot=1.0))
#: In place of the trained predictors, of which there is none for the tiny model.
NOISY = {"predictor": "noisy_oracle", "predictor_noise": 0.5}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings that share what was compiled: the programs are the same for all."""
    return TIGHT | {"compilation_cache_dir": str(tmp_path_factory.mktemp("compiled"))}


@pytest.fixture(scope="module", params=PRESETS)
def llm(request: pytest.FixtureRequest, compiled: dict[str, Any]) -> Iterator[LLM]:
    config = CONFIGS / f"{request.param}.yaml"
    own = NOISY if PREDICTORS.selected(EngineConfig.load(config)).reader else {}
    if request.param == "adaserve":  # drafts in every step, as in the paper
        own = {"tree": "adaserve", "adaserve": {"economic": False}, "verify_budget": 12}
    with tiny.llm(config=str(config), **compiled | own) as llm:
        yield llm


def crowd(llm: LLM, each: list[SamplingParams]) -> list[list[int]]:
    """Half of the requests, and the others, of higher priority, as soon as the first has written something."""
    out: list[list[int]] = [[] for _ in each]
    ends = [Event() for _ in each]
    half = len(each) // 2

    def submit(several: range) -> None:
        for i in several:
            llm.engine.submit(
                TEXTS[i], each[i], lambda delta, i=i: take(i, delta), priority=-i, expected_tokens=each[i].max_tokens,
                slo=SLOS[i % len(SLOS)],
            )  # fmt: skip

    def take(i: int, delta: OutputDelta) -> None:
        first = not out[i]
        out[i] += delta.token_ids
        if i == 0 and first:
            submit(range(half, len(each)))
        if delta.finish_reason is not None:
            ends[i].set()

    submit(range(half))
    assert all(end.wait(PATIENCE) for end in ends)
    return out


def test_every_order_writes_what_a_request_writes_alone(llm: LLM) -> None:
    each = [replace(GREEDY, max_tokens=n) for n in LENGTHS]
    expected = [tiny.greedy(text, n) for text, n in zip(TEXTS, LENGTHS, strict=True)]
    before = llm.engine.stats().compilations_after_warmup
    for _ in range(3):
        assert crowd(llm, each) == expected
        check_clean(llm)
    stats = llm.engine.stats()
    assert stats.accepted_tokens > 0 and stats.preemptions > 0
    assert stats.compilations_after_warmup == before
    order = llm.engine.config.order
    if order in PAUSING:
        assert stats.pauses > 0 and stats.recomputed_tokens > 0 and stats.recompute_seconds > 0
    elif not ORDERS[order].preempts(ORDERS.section_of(llm.engine.config)):
        assert stats.pauses == 0


def test_penalties_and_samples_survive_pauses(llm: LLM) -> None:
    """Every request is penalised, so every slot needs a row; a paused request frees its row."""
    each = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=n, ignore_eos=True, presence_penalty=0.7,
                       repetition_penalty=1.2, logit_bias={3: 1.0})
        for i, n in enumerate(LENGTHS)
    ]  # fmt: skip
    alone = [tokens_of(llm.generate([text], [p])[0]) for text, p in zip(TEXTS, each, strict=True)]
    assert crowd(llm, each) == alone
    check_clean(llm)


def test_cancelling_in_the_crowd_leaks_nothing(llm: LLM) -> None:
    ends = [Event() for _ in TEXTS]
    started = Event()

    def take(i: int, delta: OutputDelta) -> None:
        started.set()
        if delta.finish_reason is not None:
            ends[i].set()

    ids = [
        llm.engine.submit(text, replace(GREEDY, max_tokens=40), lambda delta, i=i: take(i, delta), priority=-i)
        for i, text in enumerate(TEXTS)
    ]
    assert started.wait(PATIENCE)
    for request_id in ids[::2]:
        llm.engine.cancel(request_id)
    assert all(end.wait(PATIENCE) for end in ends)
    check_clean(llm)


def test_a_batch_waits_for_its_timeout_without_turning(
    compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = 0
    plan = Scheduler.plan

    def counted(self: Scheduler, *args: Any) -> Any:
        nonlocal plans
        plans += 1
        return plan(self, *args)

    monkeypatch.setattr(Scheduler, "plan", counted)
    settings = compiled | dict(batching="dynamic", max_batch_size=2, batch_wait_timeout_ms=300.0)
    with tiny.llm(**settings) as llm:
        params = replace(GREEDY, max_tokens=1)
        out = llm.generate([TEXTS[0]], params)[0]
        assert tokens_of(out) == tiny.greedy(TEXTS[0], 1)
        assert out.metrics.e2e is not None and out.metrics.e2e >= 0.3
        assert plans < 10
        both = llm.generate(TEXTS[:2], params)
        assert [tokens_of(o) for o in both] == [tiny.greedy(t, 1) for t in TEXTS[:2]]
        assert all(o.metrics.first_scheduled == both[0].metrics.first_scheduled for o in both)
        ended = Event()
        llm.engine.submit(TEXTS[0], params, lambda delta: ended.set() if delta.finish_reason else None)
    assert ended.is_set()  # the shutdown did not wait for the batch


def test_a_drain_ends_what_waits_for_a_batch(compiled: dict[str, Any]) -> None:
    settings = compiled | dict(batching="dynamic", max_batch_size=2, batch_wait_timeout_ms=200.0)
    llm = tiny.llm(**settings)
    reasons: list[str] = []
    take = lambda delta: reasons.append(delta.finish_reason) if delta.finish_reason else None  # noqa: E731
    llm.engine.submit(TEXTS[0], replace(GREEDY, max_tokens=2), take)
    llm.engine.shutdown(drain=True, timeout=PATIENCE)
    assert reasons == ["length"]


def test_an_expectation_is_a_number_of_tokens(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="expected_tokens"):
        llm.engine.submit(TEXTS[0], GREEDY, lambda delta: None, expected_tokens=0)
