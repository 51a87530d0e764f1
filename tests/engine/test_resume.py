"""A request resumed on another engine goes on as it would have gone on where it began."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tiny
from helpers.generation import GREEDY, check_clean, params, prompts
from helpers.patience import PATIENCE
from jaxspec import LLM, InvalidRequest, SamplingParams, StructuredOutputs
from jaxspec.outputs import OutputDelta
from jaxspec.sched.admission import SloAdmission, SloRefused
from jaxspec.sched.length.distribution import LengthDistribution
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import QueueFull
from jaxspec.sched.slo import Slo
from jaxspec.sched.timing import StepTimes

SIZES: dict[str, Any] = dict(page_size=16, max_num_seqs=4, token_buckets=[1, 16], compilation_cache_dir="")
#: Bytes of characters with two to four of them, so that many cuts are inside a character.
MULTI_BYTE = {b: 30.0 for b in "äß漢字🦉".encode()}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "né"]}, "b": {"type": "boolean"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def first() -> Iterator[LLM]:
    with tiny.llm(kv_cache_tokens=2048, max_num_batched_tokens=16, max_model_len=128, draft=[], **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def other() -> Iterator[LLM]:
    """Another machine: drafts, smaller steps, another seed for requests without one."""
    sizes: dict[str, Any] = dict(kv_cache_tokens=1024, max_num_batched_tokens=12, max_model_len=128, seed=7)
    with tiny.llm(draft=["suffix"], tree="chain", **sizes, **SIZES) as llm:
        yield llm


def run(
    llm: LLM, prompt: Sequence[int], params: SamplingParams, resumed: Sequence[int] | None = None
) -> list[OutputDelta]:
    deltas, ended = list[OutputDelta](), threading.Event()

    def on_output(delta: OutputDelta) -> None:
        deltas.append(delta)
        if delta.finish_reason is not None:
            ended.set()

    llm.engine.submit(prompt, params, on_output, resumed=resumed)
    assert ended.wait(PATIENCE)
    check_clean(llm)
    return deltas


def tokens_of(deltas: Sequence[OutputDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text_of(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


special = st.one_of(
    st.just({}),
    st.sampled_from(["ä", "漢字", "🦉ä", "ab"]).map(lambda stop: {"stop": [stop], "logit_bias": MULTI_BYTE}),
    st.just(
        {"logit_bias": MULTI_BYTE, "min_tokens": 4, "max_tokens": 20, "stop": ["ß"], "include_stop_str_in_output": True}
    ),
    st.just({"structured_outputs": StructuredOutputs(json=SCHEMA), "max_tokens": 40}),
    st.just({"structured_outputs": StructuredOutputs(regex="(ab){3,5}c"), "logprobs": 1}),
    st.just({"ignore_eos": False, "logit_bias": {256: 14.0}, "min_tokens": 5, "max_tokens": 24}),
    st.just({"stop_token_ids": list(range(0, 250, 17)), "skip_special_tokens": False}),
    st.just({"bad_words": ["ä", "b"], "logprobs": 3, "prompt_logprobs": 1, "logit_bias": MULTI_BYTE}),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(prompt=prompts, plain=params, more=special, share=st.floats(0, 1))
def test_two_parts_are_the_whole(
    first: LLM, other: LLM, prompt: list[int], plain: SamplingParams, more: dict[str, Any], share: float
) -> None:
    asked = replace(plain, **more)
    whole = run(first, prompt, asked)
    cut = int(share * (len(whole) - 1))
    begun, resumed = whole[:cut], tokens_of(whole[:cut])
    assert len(resumed) < len(tokens_of(whole))  # the delta with the last token says that it has ended
    rest = run(other, prompt, asked, resumed)
    both = [*begun, *rest]
    assert tokens_of(both) == tokens_of(whole)
    assert text_of(both) == text_of(whole)
    last, metrics = rest[-1], rest[-1].metrics
    assert (last.finish_reason, last.stop_reason) == (whole[-1].finish_reason, whole[-1].stop_reason)
    assert metrics is not None
    assert (metrics.prompt_tokens, metrics.output_tokens) == (len(prompt), len(tokens_of(whole)))
    assert metrics.resumed_tokens == len(resumed) and metrics.cached_tokens <= len(prompt)
    expected, found = ([p for delta in part for p in delta.logprobs] for part in (whole, both))
    assert [(p.token_id, [t for t, _ in p.top]) for p in found] == [
        (p.token_id, [t for t, _ in p.top]) for p in expected
    ]
    assert [p.logprob for p in found] == pytest.approx([p.logprob for p in expected], abs=1e-4)
    scored = [delta.prompt_logprobs for delta in both if delta.prompt_logprobs is not None]
    assert len(scored) == (asked.prompt_logprobs is not None)


def test_a_request_that_has_ended_is_refused(first: LLM) -> None:
    refused: list[tuple[dict[str, Any], list[int], str]] = [
        (dict(max_tokens=3), [1, 2, 3], "has ended"),
        (dict(stop_token_ids=[9]), [8, 9], "has ended"),
        (dict(ignore_eos=False), [8, 256], "has ended"),
        (dict(stop=["ab"]), list(b"xab"), "has ended"),
        (dict(structured_outputs=StructuredOutputs(choice=["no", "yes"])), list(b"yes"), "has ended"),
        (dict(structured_outputs=StructuredOutputs(choice=["no", "yes"])), list(b"nay"), "does not allow"),
        (dict(), [257], "between 0 and 256"),
    ]
    for more, resumed, message in refused:
        with pytest.raises(InvalidRequest, match=message) as raised:
            first.engine.submit([1, 2], replace(GREEDY, **more), lambda _: None, resumed=resumed)
        assert raised.value.field == "resumed"
    check_clean(first)


def test_an_admitted_request_is_not_refused_elsewhere() -> None:
    times = StepTimes({1: 1.0})
    admission = SloAdmission(times, LengthDistribution(), strict=True, paced=False, max_num_seqs=2)
    request = Request("a", 1, [0], 9, 0.0, slo=Slo(tpot=0.5))
    with pytest.raises(SloRefused):
        admission.admit(request, 1, ())
    admission.admit(request, 1, (), admitted=True)
    assert (len(admission), admission.refused) == (1, 1)


def test_a_full_queue_takes_admitted_requests() -> None:
    with tiny.llm(kv_cache_tokens=1024, max_model_len=128, max_queued_requests=1, draft=[], **SIZES) as llm:
        ended = threading.Semaphore(0)

        def on_output(delta: OutputDelta) -> None:
            if delta.finish_reason is not None:
                ended.release()

        def submit(**more: Any) -> None:
            llm.engine.submit([1], replace(GREEDY, max_tokens=100), on_output, **more)

        def flood(most: int = 40) -> int:
            for taken in range(most):
                try:
                    submit()
                except QueueFull:
                    return taken
            raise AssertionError("the queue never was full")

        taken = flood()
        submit(resumed=())
        submit(resumed=tiny.greedy([1], 20))
        for _ in range(taken + 2):
            assert ended.acquire(timeout=PATIENCE)
        check_clean(llm)


def test_a_resumed_request_is_measured_from_its_arrival_here(first: LLM) -> None:
    """Its TPOT counts the tokens of this engine only, and its prompt and output are computed like one prompt."""
    free = tiny.greedy([5, 6, 7], 12)
    (*_, last) = run(first, [5, 6, 7], GREEDY, free[:10])
    metrics = last.metrics
    assert metrics is not None and metrics.tpot is not None and metrics.first_token is not None
    assert metrics.finished is not None and metrics.tpot == metrics.finished - metrics.first_token
    before = first.engine.stats()
    (*_, last) = run(first, [5, 6, 7], replace(GREEDY, max_tokens=48), tiny.greedy([5, 6, 7], 47))
    after = first.engine.stats()
    assert last.token_ids == (tiny.greedy([5, 6, 7], 48)[-1],)
    assert (after.generation_tokens - before.generation_tokens, after.steps - before.steps) == (1, 4)
