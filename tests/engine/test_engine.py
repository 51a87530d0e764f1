"""The engine on a tiny model: in any crowd, chunking, preemption or sharing a request writes what it writes alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tiny
from helpers.generation import GREEDY, check_clean, params, prompts, tokens_of
from helpers.patience import PATIENCE
from jaxspec import LLM, InvalidRequest, SamplingParams
from jaxspec.errors import EngineDead
from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.sched.scheduler import QueueFull

COMMON: dict[str, Any] = dict(draft=[], page_size=16, max_num_seqs=6, token_buckets=[1, 16], compilation_cache_dir="")


@pytest.fixture(scope="module")
def roomy() -> Iterator[LLM]:
    with tiny.llm(kv_cache_tokens=2048, max_num_batched_tokens=16, max_model_len=128, **COMMON) as llm:
        yield llm


@pytest.fixture(scope="module")
def tight() -> Iterator[LLM]:
    """Pages for little more than one long request; preempted requests are recomputed."""
    sizes: dict[str, Any] = dict(kv_cache_tokens=80, max_num_batched_tokens=12, max_model_len=72, memory="recompute")
    with tiny.llm(**sizes, **COMMON) as llm:
        yield llm


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_crowd_writes_what_each_request_writes_alone(roomy: LLM, tight: LLM, data: Any) -> None:
    stem = data.draw(prompts)
    texts = data.draw(st.lists(prompts, min_size=1, max_size=7))
    texts = [stem + t if data.draw(st.booleans()) else t for t in texts]
    texts = [t[:48] for t in texts]
    each = [data.draw(params) for _ in texts]
    alone = [tokens_of(roomy.generate([t], [p])[0]) for t, p in zip(texts, each, strict=True)]
    for text, p, tokens in zip(texts, each, alone, strict=True):
        if p.greedy and not p.penalised:
            assert tokens == tiny.greedy(text, p.max_tokens or 0)
    for llm in (roomy, tight):
        together = [tokens_of(o) for o in llm.generate(texts, each)]
        assert together == alone
        check_clean(llm)


def test_preemption_happened_and_nothing_compiled(roomy: LLM, tight: LLM) -> None:
    tiny.greedy([1], 1)  # the reference compiles too, but not now
    before = roomy.engine.stats().compilations_after_warmup
    texts = [[i, i + 1, i + 2] for i in range(6)]
    expected = [tiny.greedy(t, 40) for t in texts]
    for llm in (roomy, tight):
        assert [tokens_of(o) for o in llm.generate(texts, replace(GREEDY, max_tokens=40))] == expected
    mixed = [replace(GREEDY, temperature=1.0, top_p=0.9, logprobs=3, presence_penalty=0.1, seed=1)] * 6
    roomy.generate(texts, mixed)
    assert tight.engine.stats().preemptions > 0
    assert roomy.engine.stats().compilations_after_warmup == before
    check_clean(tight)


def test_shared_prefixes_are_computed_once(roomy: LLM) -> None:
    stem = list(range(60, 108))
    roomy.generate([stem], GREEDY)
    before = roomy.engine.stats()
    out = roomy.generate([[*stem, 1], [*stem, 2]], GREEDY)
    after = roomy.engine.stats()
    assert after.prefix_hits - before.prefix_hits == 96 and after.prompt_tokens - before.prompt_tokens == 2
    assert [o.metrics.cached_tokens for o in out] == [48, 48]
    assert tokens_of(out[1]) == tiny.greedy([*stem, 2], 12)


def test_eos_stop_ids_and_lengths(roomy: LLM) -> None:
    text = [3, 1, 4, 1, 5]
    free = tiny.greedy(text, 12)
    stopped = roomy.generate([text], replace(GREEDY, stop_token_ids=[free[4]]))[0].outputs[0]
    first = free.index(free[4])
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (free[: first + 1], "stop", free[4])
    full = roomy.generate([text], GREEDY)[0].outputs[0]
    assert (full.token_ids, full.finish_reason) == (free, "length")
    forced = roomy.generate([text], SamplingParams(temperature=0, logit_bias={256: 100.0}, max_tokens=5))[0].outputs[0]
    assert (forced.token_ids, forced.finish_reason, forced.text) == ([256], "stop", "")


def test_stop_string_ends_the_text_before_it(roomy: LLM) -> None:
    text = [65]
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={b: 60.0 for b in b"abcd"}, seed=1)
    whole = roomy.generate([text], params)[0].outputs[0].text
    assert len(whole) == 8 and set(whole) <= set("abcd")
    stop = whole[3:5]
    cut = roomy.generate([text], replace(params, stop=[stop]))[0].outputs[0]
    assert cut.text == whole[: whole.index(stop)] and cut.stop_reason == stop and cut.finish_reason == "stop"
    kept = roomy.generate([text], replace(params, stop=[stop], include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == cut.text + stop


def test_n_outputs_have_seeds_of_their_own(roomy: LLM) -> None:
    p = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=10, ignore_eos=True)
    outputs = [o.token_ids for o in roomy.generate([[1, 2, 3]], p)[0].outputs]
    assert len({tuple(o) for o in outputs}) == 3
    assert outputs[1] == tokens_of(roomy.generate([[1, 2, 3]], replace(p, n=1, seed=6))[0])


def test_logprobs_of_outputs_and_prompt(roomy: LLM) -> None:
    text = list(range(30))
    out = roomy.generate([text], replace(GREEDY, logprobs=3, prompt_logprobs=2))[0]
    tokens = tokens_of(out)
    logits = tiny.logits(text + tokens).astype("float64")
    reference = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert out.outputs[0].logprobs is not None and out.prompt_logprobs is not None
    for i, entry in enumerate(out.outputs[0].logprobs):
        row = reference[len(text) + i - 1]
        assert entry.token_id == tokens[i] and entry.logprob == pytest.approx(row[tokens[i]], abs=1e-4)
        assert [t for t, _ in entry.top] == list(row.argsort()[::-1][:3])
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == 30
    for i, entry in enumerate(out.prompt_logprobs[1:], start=1):
        assert entry is not None and entry.token_id == text[i] and len(entry.top) == 2
        assert entry.logprob == pytest.approx(reference[i - 1][text[i]], rel=1e-5, abs=1e-4)


def test_prompt_logprobs_survive_preemption(roomy: LLM, tight: LLM) -> None:
    """A recomputed chunk may run from the prompt into the output: all its logits are read, and counted."""
    params = replace(GREEDY, max_tokens=50, prompt_logprobs=0)
    texts = [[i, 7, 7, 7, 3, i, 1, 2] for i in range(4)]
    alone = [roomy.generate([t], params)[0] for t in texts]
    before = tight.engine.stats().preemptions
    together = tight.generate(texts, params)
    assert tight.engine.stats().preemptions > before
    for a, b in zip(alone, together, strict=True):
        assert tokens_of(a) == tokens_of(b) and a.prompt_logprobs is not None and b.prompt_logprobs is not None
        pairs = zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True)
        assert all(x and y and x.logprob == pytest.approx(y.logprob, abs=1e-4) for x, y in pairs)
    check_clean(tight)


def test_the_first_token_is_observed_once_also_with_preemptions(tight: LLM) -> None:
    seen: list[RequestMetrics] = []
    tight.engine.first_token_observers.append(seen.append)
    before = tight.engine.stats().preemptions
    outputs = tight.generate([[i] * 30 for i in range(4)], replace(GREEDY, max_tokens=30))
    tight.engine.first_token_observers.clear()
    assert tight.engine.stats().preemptions > before
    assert sorted(m.arrival for m in seen) == [o.metrics.arrival for o in outputs]
    assert all(m.ttft is not None and m.ttft > 0 for m in seen)


def test_the_tokens_of_every_step_are_observed(roomy: LLM) -> None:
    seen: list[int] = []
    before = roomy.engine.stats()
    roomy.engine.step_observers.append(seen.append)
    outputs = roomy.generate([[90 + i] * 9 for i in range(3)], replace(GREEDY, max_tokens=5))
    roomy.engine.step_observers.clear()
    assert [o.metrics.max_tokens for o in outputs] == [5] * 3
    after = roomy.engine.stats()
    assert (len(seen), sum(seen)) == (after.steps - before.steps, 3 * (9 + 5))
    assert after.kv_pages == 2048 // 16


def test_a_failing_receiver_ends_only_its_own_request(roomy: LLM) -> None:
    def broken(delta: OutputDelta) -> None:
        raise ValueError("no")

    roomy.engine.submit([1, 2, 3], replace(GREEDY, max_tokens=60), broken)
    assert tokens_of(roomy.generate([[4, 5]], GREEDY)[0]) == tiny.greedy([4, 5], 12)
    check_clean(roomy)


def test_a_late_cancel_does_not_reach_a_new_request_of_the_same_id(roomy: LLM) -> None:
    ended = threading.Event()
    reasons: list[str] = []

    def take(delta: OutputDelta) -> None:
        if delta.finish_reason:
            reasons.append(delta.finish_reason)
            ended.set()

    roomy.engine.cancel("same")  # unknown
    roomy.engine.submit([1] * 30, GREEDY, take, request_id="same")
    assert ended.wait(PATIENCE) and reasons == ["length"]


def test_penalties_act(roomy: LLM) -> None:
    text = [9, 9, 9]
    tokens = tokens_of(
        roomy.generate([text], replace(GREEDY, max_tokens=60, presence_penalty=2, repetition_penalty=8))[0]
    )
    assert len(set(tokens)) == 60  # so strong that nothing is said twice
    assert 9 not in tokens


def test_cancelled_requests_end_and_others_are_unaffected(roomy: LLM) -> None:
    got: dict[str, list[OutputDelta]] = {}
    done = threading.Semaphore(0)

    def take(delta: OutputDelta) -> None:
        got.setdefault(delta.request_id, []).append(delta)
        if delta.finish_reason:
            done.release()
        elif delta.request_id.startswith("cut"):
            roomy.engine.cancel(delta.request_id)

    for i in range(4):
        roomy.engine.submit([i, 2], replace(GREEDY, max_tokens=60), take, request_id=f"{'cut' if i % 2 else 'run'}-{i}")
    for _ in range(4):
        assert done.acquire(timeout=PATIENCE)
    for i in range(4):
        name = f"{'cut' if i % 2 else 'run'}-{i}"
        tokens = [t for d in got[name] for t in d.token_ids]
        full = tiny.greedy([i, 2], 60)
        assert got[name][-1].finish_reason == ("abort" if i % 2 else "length")
        assert tokens == full[: len(tokens)] and (i % 2 or len(tokens) == 60)
    check_clean(roomy)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([1] * 200, {}, "prompt"),
        ([257], {}, "prompt"),
        ([1.0, 2], {}, "prompt"),
        ([1], {"max_tokens": 500}, "max_tokens"),
        ([1], {"stop_token_ids": [999]}, "stop_token_ids"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias"),
    ],
)
def test_bad_requests_are_refused_by_name(roomy: LLM, prompt: list[int], params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        roomy.engine.submit(prompt, SamplingParams(**params), lambda _: None)
    assert error.value.field == field


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2},
        {"top_k": 2**31}, {"min_p": 2}, {"presence_penalty": 3}, {"repetition_penalty": 0}, {"n": 0}, {"max_tokens": 0},
        {"stop": [""]}, {"logprobs": 21}, {"logit_bias": {1: 101.0}}, {"seed": 2**64},
    ],
)  # fmt: skip
def test_sampling_params_name_what_is_wrong(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(bad))) as error:
        SamplingParams(**bad)
    assert error.value.field == next(iter(bad))


def small(**changes: Any) -> LLM:
    return tiny.llm(**{**COMMON, "kv_cache_tokens": 256, "max_num_batched_tokens": 16, **changes})


def test_queue_is_bounded_and_a_failure_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with small(max_queued_requests=2, token_buckets=[16]) as llm:
        gate, ended = threading.Event(), []

        def failing(*_: Any) -> Any:
            gate.wait(PATIENCE)
            raise RuntimeError("the device caught fire")

        monkeypatch.setattr(llm.engine.loop.model_runner, "execute", failing)
        llm.engine.loop.recovery.most_restarts = 0

        def take(delta: OutputDelta) -> None:
            ended.append((delta.finish_reason, delta.error))

        def submit() -> None:
            llm.engine.submit([1, 2], GREEDY, take)

        submit()
        while llm.engine.stats().waiting:  # until the loop has taken it in
            time.sleep(0.01)
        submit()
        submit()
        with pytest.raises(QueueFull, match="try again"):
            submit()
        gate.set()
        deadline = time.monotonic() + PATIENCE
        while len(ended) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [reason for reason, _ in ended] == ["error"] * 3
        assert all(error and "caught fire" in error for _, error in ended)
        assert llm.engine.health == "dead" and llm.engine.failure
        with pytest.raises(EngineDead, match="caught fire"):
            submit()


def test_shutdown_drains_or_aborts() -> None:
    for drain, reason in ((True, "length"), (False, "abort")):
        llm = small(token_buckets=[16])
        ended: list[str] = []

        def take(delta: OutputDelta, ended: list[str] = ended) -> None:
            if delta.finish_reason:
                ended.append(delta.finish_reason)

        llm.engine.submit([1, 2], replace(GREEDY, max_tokens=100), take)
        llm.engine.shutdown(drain=drain, timeout=PATIENCE)
        assert ended == [reason]
        assert llm.engine.health == "dead"
