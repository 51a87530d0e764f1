"""When lengths are predicted again."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.steps import Steps
from jaxspec.sched.reprediction import Repredictor
from jaxspec.sched.request import Request


def test_due_while_others_wait_and_only_where_the_last_token_is_all_that_is_missing() -> None:
    """After a preemption the hidden state of the last known token is not there yet."""
    run, asked = Steps(order="srpt"), list[str]()

    def left_of(requests: Sequence[Request]) -> list[float]:
        asked.extend(r.id for r in requests)
        return [7.0] * len(requests)

    again = Repredictor(run.scheduler, 4, left_of)
    first = run.add("a", predicted_len=40, true_len=40)
    for _ in range(6):
        run.step()
    assert again.due() == [], "nobody waits"
    run.add("b", predicted_len=50, true_len=50)
    computed, first.computed = first.computed, first.computed - 2
    assert again.due() == []
    again.predict([first], run.now)
    assert asked == [] and not first.repredicted
    first.computed = computed
    assert again.due() == [first]
    again.predict([first], run.now)
    output = first.output_len
    assert asked == ["a"] and first.repredicted == [(output, (7.0 * (40 - output)) ** 0.5)]
    assert first.predicted_len == output + first.repredicted[0][1]
    for _ in range(3):
        run.step()
        assert again.due() == [], "not before four more tokens"


def test_a_probe_that_fails_leaves_first_predictions_and_is_not_asked_again() -> None:
    run, calls = Steps(order="srpt"), list[int]()

    def left_of(requests: Sequence[Request]) -> list[float]:
        calls.append(len(requests))
        raise RuntimeError("no probe")

    again = Repredictor(run.scheduler, 4, left_of)
    first = run.add("a", predicted_len=40, true_len=40)
    for _ in range(6):
        run.step()
    run.add("b", predicted_len=50, true_len=50)
    again.due()
    again.predict([first], run.now)
    assert calls == [1] and first.predicted_len == 40 and not first.repredicted
    for _ in range(20):
        run.step()
        assert again.due() == []
