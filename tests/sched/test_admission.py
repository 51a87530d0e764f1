"""`SloAdmission`: which requests with an SLO are admitted."""

from __future__ import annotations

import contextlib
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sched.admission import MARGIN, LoadStats, SloAdmission, SloRefused, tightest_slo
from jaxspec.sched.length.distribution import LengthDistribution
from jaxspec.sched.request import Request
from jaxspec.sched.slo import Slo
from jaxspec.sched.timing import StepTimes

#: 10 ms and 2 ms a token, up to 64 of them.
TIMES = StepTimes({n: 1e-3 * (10 + 2 * n) for n in range(1, 65)})


def request(name: str = "r", tpot: float | None = None, ttft: float | None = None, prompt: int = 4) -> Request:
    return Request(name, prompt, [0] * prompt, 50, 0.0, slo=Slo(tpot, ttft))


def decoding(name: str) -> Request:
    return Request(name, 4, [0] * 9, 50, 0.0, computed=8, first_token=0.1)


def slo_admission(paced: bool = True, max_num_seqs: int = 8) -> SloAdmission:
    return SloAdmission(TIMES, LengthDistribution(), strict=True, paced=paced, max_num_seqs=max_num_seqs)


def fits(made: SloAdmission, number: int, tpot: float, **seen: float) -> int:
    """How many of `number` requests with this TPOT are admitted."""
    count = 0
    for i in range(number):
        try:
            made.admit(request(f"{tpot}-{i}", tpot), 0, [], LoadStats(**seen))  # its prompt is cached
            count += 1
        except SloRefused:
            pass
    return count


def test_as_many_are_admitted_as_a_step_within_the_slo_holds():
    """0.9 × 40 ms is a step of 13."""
    made = slo_admission()
    assert fits(made, 20, 0.04) == len(made) == 13 and made.refused == 7


def test_requests_with_laxer_slos_take_part_in_fewer_steps():
    made = slo_admission()
    assert fits(made, 10, 0.04) == 10
    assert fits(made, 40, 0.4) == 30  # a tenth of a place each in steps of 40 ms
    made = slo_admission(paced=False)  # all decode in all steps
    assert fits(made, 10, 0.04) == 10 and fits(made, 40, 0.4) == 3


def test_a_tight_slo_is_refused_because_of_those_admitted_before():
    made = slo_admission()
    assert fits(made, 14, 0.06) == 14
    with pytest.raises(
        SloRefused, match=r"slo\.tpot_ms: 20 cannot be met together with 14 .* about 22 ms and may take 18"
    ):
        made.admit(request("x", 0.02), 4, [])
    made.admit(request("x", 0.04), 4, [])


def of(tenant: str, count: int) -> list[Request]:
    return [Request(f"{tenant}{i}", 4, [0] * 4, 50, 0.0, tenant=tenant) for i in range(count)]


def test_a_tenant_leaves_room_for_those_with_fewer_requests():
    """13 requests fit, as above."""

    def admitted(tenant: str, has: int, there: int, tenants: tuple[str, ...], slo: Slo) -> bool:
        made = slo_admission(max_num_seqs=13)
        assert fits(made, there, 0.04) == there  # 36 of 36 ms with 13
        others = [*of(tenant, has), *of("others", there - has)]
        try:
            made.admit(Request("x", 4, [0] * 4, 50, 0.0, slo=slo, tenant=tenant), 0, others, tenants=tenants)
        except SloRefused:
            return False
        return True

    for slo in (Slo(0.04), Slo(None, 0.5)):
        assert admitted("heavy", 12, 12, ("heavy",), slo)
        assert not admitted("heavy", 12, 12, ("heavy", "light"), slo)
        assert admitted("heavy", 11, 11, ("heavy", "light"), slo)
        assert admitted("light", 0, 12, ("heavy", "light"), slo)  # the room that was left
        assert admitted("heavy", 8, 10, ("heavy", *"abcdefgh"), slo)  # for two at most
        assert not admitted("heavy", 8, 11, ("heavy", *"abcdefgh"), slo)
        assert admitted("heavy", 1, 11, ("heavy", *"abcdefgh"), slo)


@pytest.mark.parametrize(("has", "most"), [(5, 14), (13, 13)])
def test_a_tenant_with_fewer_requests_than_another_may_use_half_of_the_margin(has: int, most: int):
    """38 instead of 36 ms."""
    made = slo_admission()
    assert fits(made, 13, 0.04) == 13
    count = 13
    for i in range(3):
        one = Request(f"x{i}", 4, [0] * 4, 50, 0.0, slo=Slo(0.04), tenant="light")
        with contextlib.suppress(SloRefused):
            made.admit(one, 0, [*of("heavy", 13), *of("light", has)])
            count += 1
    assert count == most


def test_host_time_of_a_step_is_counted():
    assert fits(slo_admission(), 20, 0.04, overhead=0.003) == 11
    with pytest.raises(SloRefused, match=r"about 70 ms"):
        slo_admission().admit(request(ttft=0.075, prompt=20), 20, [], LoadStats(overhead=0.02))


def test_speculation_is_counted_with_what_it_costs():
    assert fits(slo_admission(), 50, 0.04, gain=2.0, drafts=0.0) == 31
    assert fits(slo_admission(), 50, 0.04, gain=2.0, drafts=1.0) == 15  # 31 tokens, two for each
    assert fits(slo_admission(), 50, 0.04, gain=1.1, drafts=8.0) == 13  # then rather without


def test_prompts_that_come_while_others_decode_are_counted():
    """40 prompt tokens for 20 output tokens: with 13 tokens a step, 4 requests decode and 8 tokens are of prompts."""

    def admitted(prompt: int, output: int, **seen: float) -> int:
        made = slo_admission()
        for i in range(20):
            one = Request(str(i), 40, [0] * 40, output, 0.0, slo=Slo(0.04))
            with contextlib.suppress(SloRefused):
                made.admit(one, prompt, [], LoadStats(**seen))
        return len(made)

    assert admitted(0, 20) == 13
    assert admitted(40, 20) == 5  # the fifth one's own prompt comes before its TPOT
    assert admitted(20, 20) == 7
    assert admitted(400, 2) == 1
    assert admitted(20, 20, gain=2.0) == 11  # of 31 tokens, 11 and twice 10 for prompts


def test_what_is_released_can_be_admitted_again():
    made = slo_admission()
    assert fits(made, 20, 0.04) == 13
    made.release("0.04-3")
    made.release("nobody")
    assert len(made) == 12 and fits(made, 2, 0.041) == 1


def test_a_first_token_in_time():
    """11 tokens wait and two decode: a step under way of 14 ms, and one of 13 and the prompt's four, 44 ms."""
    others = [request("a", prompt=7), request("b"), decoding("c"), decoding("d")]
    slo_admission().admit(request(ttft=0.065), 4, others)
    with pytest.raises(SloRefused, match=r"slo\.ttft_ms: 64 .* 13 tokens .* prompt's 4, .* 58 ms and may take 57.6 ms"):
        slo_admission().admit(request(ttft=0.064), 4, others)
    slo_admission().admit(request(ttft=0.064), 3, others)  # one is cached
    with pytest.raises(SloRefused, match="about 1380 ms"):  # ten steps of 64
        slo_admission().admit(request(ttft=1.5, prompt=640), 640, [])


def test_a_first_token_when_all_slots_are_taken():
    """A slot is free when the first of two decoding requests has reached the 90 % quantile of its output."""
    others = [request("a", prompt=7), request("b"), decoding("c"), decoding("d")]
    several = [decoding(name) for name in "abcd"]
    ends = sorted(LengthDistribution().quantile(r, 0.9) - r.output_len for r in several)
    wait = ends[0] * (10 + 2 * 4)  # ms, in steps of four
    with pytest.raises(SloRefused, match=rf"all 4 slots are taken: one is free in about {wait:g} ms"):
        slo_admission(max_num_seqs=4).admit(request(ttft=wait / 1000), 4, several)
    slo_admission(max_num_seqs=4).admit(request(ttft=1.2 * wait / 1000 + 0.1), 4, several)
    with pytest.raises(SloRefused, match=r"all 1 slots are taken$"):  # three would have to end, two decode
        slo_admission(max_num_seqs=1).admit(request(ttft=9.0), 4, others)
    hurried = LoadStats(gain=2.0)
    slo_admission(max_num_seqs=4).admit(request(ttft=0.7 * wait / 1000 + 0.1), 4, several, hurried)


def test_requests_without_slo_are_never_refused():
    made = slo_admission(max_num_seqs=1)
    for i in range(100):
        made.admit(request(str(i)), 4, [decoding("a")])
    easy = SloAdmission(TIMES, LengthDistribution(), strict=False, paced=True, max_num_seqs=1)
    for i in range(100):
        easy.admit(request(str(i), 0.001, 0.001), 4, [decoding("a")])
    assert len(made) == len(easy) == made.refused == easy.refused == 0


events = st.lists(
    st.tuples(
        st.integers(0, 12), st.floats(0.011, 1.0), st.floats(1.0, 4.0), st.floats(0.0, 8.0), st.floats(0.0, 0.02)
    ),
    max_size=60,
)


@settings(deadline=None)
@given(events, st.booleans())
def test_a_step_for_all_is_never_longer_than_the_tightest_slo(events, paced):
    """In any order of coming and going: an event is a request that comes, or goes if it is there."""
    made, kept = slo_admission(paced), {}
    for number, tpot, gain, drafts, overhead in events:
        if number in kept:
            made.release(str(number))
            del kept[number]
            continue
        wanted = {**kept, number: tpot}
        tightest = min(wanted.values())
        load = ceil(sum(tightest / t if paced else 1 for t in wanted.values()) - 1e-9)
        try:
            made.admit(request(str(number), tpot), 0, [], LoadStats(gain, drafts, overhead))
        except SloRefused:
            assert TIMES.of(load) + overhead > MARGIN * tightest
            assert len(made) == len(kept)
            continue
        assert TIMES.of(load) + overhead <= MARGIN * tightest * gain
        kept = wanted
        assert len(made) == len(kept)


def test_the_least_that_is_possible():
    assert tightest_slo(TIMES, 0, 10).tpot == pytest.approx(0.006)
    assert tightest_slo(TIMES, 0, 10).ttft == pytest.approx(0.015)
    assert tightest_slo(TIMES, 8, 640).tpot == pytest.approx(0.006 / 9)
    assert tightest_slo(TIMES, 8, 640).ttft == pytest.approx(0.69)


def test_requests_with_long_contexts_take_more_of_a_step():
    """36 ms: 10 ms for the step, 2 ms a token, and 1 ms per 100 positions of each."""
    for prompt, room in ((4, 12), (200, 6), (1000, 2)):
        made = SloAdmission(
            StepTimes({n: 1e-3 * (10 + 2 * n) for n in range(1, 65)}, 10e-6),
            LengthDistribution(),
            strict=True,
            paced=True,
            max_num_seqs=64,
        )
        admitted: list[Request] = []
        for i in range(20):
            one = request(str(i), 0.04, prompt=prompt)
            with contextlib.suppress(SloRefused):
                made.admit(one, 0, admitted)  # cached: its context counts, not its prompt
                admitted.append(one)
        assert len(admitted) == room and made.refused == 20 - room


def test_expected_outputs_are_those_of_requests_that_have_ended():
    """A request is admitted before its length is predicted."""
    lengths = LengthDistribution()
    for i in range(2000):
        ended = Request(str(i), 4, [0] * 24, 500, 0.0, first_prediction=20.0)
        lengths.ended(ended, True)
    made = SloAdmission(TIMES, lengths, strict=True, paced=True, max_num_seqs=64)
    for i in range(20):
        with contextlib.suppress(SloRefused):
            made.admit(Request(str(i), 40, [0] * 40, 500, 0.0, slo=Slo(0.04)), 40, [])
    assert len(made) == 5  # as above, 40 prompt tokens for 20 output tokens
