"""How the papers' experiments serve requests on the engine: to given lengths, and to EOS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from helpers import tiny
from helpers.generation import tokens_of
from jaxspec import LLM, InvalidRequest, SamplingParams
from jaxspec.bench.papers.serving import answered, once, to_eos
from jaxspec.sched.plan import Lookahead, Plan, RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.sim.workload import Workload

IDS = [[5, 6 + i % 4, 7, 8] * 4 + [i] * 3 for i in range(6)]
LENGTHS = np.array([4, 9, 1, 20, 7, 3])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny.llm(
        compilation_cache_dir="", kv_cache_tokens=512, max_model_len=96, max_num_batched_tokens=16, max_num_seqs=3,
        page_size=16, token_buckets=[16], draft="ngram", tree="chain", draft_depth=3, predictor="oracle",
        enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        yield llm


class Seen:
    """What the scheduler knows of each request, in order of arrival, and how they ended."""

    def __init__(self, llm: LLM) -> None:
        self.max_tokens: list[int] = []
        self.predicted: list[float | None] = []
        self.reasons: list[str] = []
        llm.engine.loop.scheduler.observers = [self]

    def added(self, request: Request, now: float) -> None:
        self.max_tokens.append(request.max_tokens)
        self.predicted.append(request.predicted_len)

    def planned(self, plan: Plan, now: float, lookahead: Lookahead) -> None: ...

    def restarted(self) -> None: ...

    def updating(self, plan: Plan, results: Sequence[RequestResult], now: float, seconds: float) -> None:
        self.reasons += [r.finish_reason for r in results if r.finish_reason]


def workload(lengths: np.ndarray, max_tokens: np.ndarray | None = None) -> Workload:
    n = len(lengths)
    return Workload(np.zeros(n), np.array([len(i) for i in IDS]), lengths, np.full(n, np.nan), max_tokens=max_tokens)


def test_given_lengths_are_not_told_to_the_scheduler(llm):
    seen = Seen(llm)
    assert [m.output_tokens for m in once(llm, workload(LENGTHS), IDS)] == LENGTHS.tolist()
    assert seen.max_tokens == [96 - len(prompt) for prompt in IDS]  # what the context leaves
    assert seen.predicted == LENGTHS.tolist()  # only the oracle knows
    assert seen.reasons == ["stop"] * 6
    seen = Seen(llm)
    once(llm, workload(LENGTHS, LENGTHS), IDS)
    assert seen.max_tokens == LENGTHS.tolist() and seen.reasons == ["length"] * 6


def test_answers_to_eos_have_the_measured_lengths(llm):
    work = answered(llm, np.zeros(len(IDS)), IDS, 40)
    assert work.output.tolist() == [m.output_tokens for m in to_eos(llm, work, IDS)] and work.caps.tolist() == [40] * 6
    plain = llm.generate(IDS, SamplingParams(temperature=0, max_tokens=40))
    assert work.output.tolist() == [len(out.outputs[0].token_ids) for out in plain]
    assert answered(llm, np.zeros(1), IDS[:1], 4000).caps.tolist() == [96 - len(IDS[0])]


def test_an_answer_that_ends_as_expected_is_the_beginning_of_the_whole(llm):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = tokens_of(llm.generate(IDS[:1], params)[0])
    got: list[int] = []
    ends: list[str] = []

    def listen(delta):
        got.extend(delta.token_ids)
        ends.extend([delta.finish_reason] if delta.finish_reason else [])

    llm.engine.submit(IDS[0], params, listen, expected_tokens=11, end_as_expected=True)
    llm.generate(IDS[1:2], params)
    assert got == whole[:11] and ends == ["stop"]
    with pytest.raises(InvalidRequest, match="expected_tokens"):
        llm.engine.submit(IDS[0], params, listen, end_as_expected=True)
