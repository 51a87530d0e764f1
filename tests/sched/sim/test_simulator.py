"""The simulator: its clock and counts against a plain reckoning, and the models it is given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sched import PagePool, PolicyConfig, Scheduler, SchedulerConfig
from jaxspec.sched.plan import Plan
from jaxspec.sched.sim.acceptance import Process, Sampled
from jaxspec.sched.sim.cost import Linear, StepLoad
from jaxspec.sched.sim.simulator import Served, Simulation, Stuck
from jaxspec.sched.sim.workload import MAX_TOKENS, Workload


def workload(
    arrival: list[float], inputs: list[int], outputs: list[int], max_tokens: list[int] | None = None
) -> Workload:
    caps = None if max_tokens is None else np.array(max_tokens)
    none = np.full(len(arrival), np.nan)
    return Workload(np.array(arrival, float), np.array(inputs), np.array(outputs), none, max_tokens=caps)


def scheduler(max_num_seqs: int = 4, tokens: int = 64, pages: int = 256) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_num_seqs, tokens, 512, None, 64), PagePool(pages, 16, enable_prefix_caching=False)
    )


def test_one_at_a_time_is_a_queue_with_one_server():
    # Each takes a step a token, one second each; the prompt's step gives the first token.
    served = Simulation(scheduler(1), workload([0, 1, 100], [4, 4, 4], [5, 3, 2]), Linear(1.0)).run()
    assert served.first_scheduled.tolist() == [0, 5, 100]
    assert served.first_token.tolist() == [1, 6, 101]
    assert served.finished.tolist() == [5, 8, 102]
    assert served.jct.tolist() == [5, 7, 2]
    assert (served.steps, served.busy, served.duration) == (10, 10.0, 102.0)
    assert served.throughput_at(1.0) == 2 / 102


def test_a_step_costs_what_it_does():
    loads: list[StepLoad] = []

    class Noted(Linear):
        def seconds(self, load: StepLoad) -> float:
            loads.append(load)
            return 1.0

    drafts = Sampled(Process(0.999), 2, np.random.default_rng(0))
    # Two prompts of 40 tokens under a budget of 64: the second one's last 16 wait for the next step.
    Simulation(scheduler(), workload([0, 0], [40, 40], [6, 1], [6, 1]), Noted(1.0), drafts, draft_length=3).run()
    assert loads[0] == StepLoad(tokens=64, starting=2)
    # One decodes with three drafts behind 40 committed positions, the other one's prompt ends behind 24.
    assert loads[1] == StepLoad(tokens=1 + 3 + 16, context=40 + 24, drafting=1, levels=3)
    # All three were right: with the token of the prompt and the verification's own five of six are there.
    assert loads[2:] == [StepLoad(tokens=1, context=44)]


requests = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=25).map(
    sorted
)


@given(requests, st.integers(1, 5), st.integers(0, 4), st.integers(6, 40))
@settings(max_examples=60, deadline=None)
def test_every_request_is_served_once_and_time_only_increases(rows, max_num_seqs, drafts, pages):
    scheduled = workload(*(list(column) for column in zip(*rows, strict=True)))
    limits = scheduler(max_num_seqs, pages=pages)
    acceptance = Sampled(Process(0.6, 0.1, 0.5), len(scheduled), np.random.default_rng(1)) if drafts else None
    percents: list[int] = []
    served = Simulation(limits, scheduled, Linear(0.01, 0.001), acceptance, drafts).run(lambda: percents.append(1))
    limits.pool.check([])
    assert not limits.has_work and len(percents) == 100
    assert (served.first_scheduled >= scheduled.arrival).all()
    assert (served.first_token > served.first_scheduled).all()
    assert (served.finished >= served.first_token).all()
    assert (served.accepted <= served.drafted).all() and (served.drafted <= drafts * served.rounds).all()
    # A round gives at most one token more than it drafted: so many steps there were at least.
    assert served.steps >= max(1 + (o - 1) / (drafts + 1) for o in scheduled.output) - 1e-9
    assert served.busy >= served.steps * 0.01


def test_requests_come_out_the_same_whatever_the_free_slots():
    # The random numbers of a request are its own: policies and batch sizes are compared on the same jobs.
    def rounds(max_num_seqs: int) -> list[int]:
        scheduled = workload([0.0] * 12, [8] * 12, [50] * 12)
        drafts = Sampled(Process(0.7, 0.1, 1.0), 12, np.random.default_rng(3))
        return Simulation(scheduler(max_num_seqs), scheduled, Linear(1.0), drafts, draft_length=4).run().rounds.tolist()

    assert rounds(1) == rounds(4)
    assert len(set(rounds(1))) > 1


def test_switching_moves_the_kv_of_paused_requests():
    turns = iter([1, 0, 0, 0])

    class Switching(Scheduler):
        """Sets its only decoding request aside in the second step, as a preemptive policy does for another."""

        def plan(self, now, lookahead=...):
            plan = super().plan(now)
            if plan.scheduled and plan.scheduled[0].start and next(turns):
                return Plan(plan.scheduled, (), (plan.scheduled[0].request,))
            return plan

        def update(self, plan, results, now, seconds=0.0):
            assert len(self._in_flight) == 1
            return super().update(self._in_flight[0], results, now, seconds)

    inner = scheduler()
    odd = Switching(inner.config, inner.pool)
    served = Simulation(odd, workload([0], [10], [3]), Linear(1.0, swap=0.5)).run()
    # Steps end at 1, then with 10 positions out and in again, then as usual.
    assert served.finished.tolist() == [1 + (1 + 0.5 * 20) + 1]
    assert served.pauses == 1


def test_a_scheduler_that_does_nothing_is_called_so():
    class Idle(Scheduler):
        def plan(self, now, lookahead=...):
            return Plan(())

    inner = scheduler()
    with pytest.raises(Stuck, match="1 requests wait at 2"):
        Simulation(Idle(inner.config, inner.pool), workload([2.0], [1], [1]), Linear(1.0)).run()


def test_waits_for_the_time_the_scheduler_names():
    class Patient(Scheduler):
        def plan(self, now, lookahead=...):
            return super().plan(now) if now >= 3.5 else Plan(())

        def wake(self, now):
            return 3.5 if now < 3.5 else None

    inner = scheduler()
    served = Simulation(Patient(inner.config, inner.pool), workload([1, 2], [1, 1], [1, 1]), Linear(1.0)).run()
    assert served.first_scheduled.tolist() == [3.5, 3.5]


def test_a_million_requests_fit():
    # Lists of plain numbers and arrays, no object a request that has ended: the whole of one is under 400 bytes.
    import tracemalloc

    n = 3000
    scheduled = workload(list(np.arange(n) * 0.1), [4] * n, [2] * n)
    tracemalloc.start()
    served = Simulation(scheduler(), scheduled, Linear(0.01)).run()
    assert isinstance(served, Served)
    assert tracemalloc.get_traced_memory()[1] / n < 400
    tracemalloc.stop()


def test_drafting_needs_acceptance():
    with pytest.raises(ValueError, match="acceptance"):
        Simulation(scheduler(), workload([0], [1], [1]), Linear(1.0), draft_length=2)


# --- max_tokens and the true length -----------------------------------------------------------------------------------


class Seen:
    """Notes every request's `max_tokens` and how it ended."""

    def __init__(self) -> None:
        self.max_tokens: list[int] = []
        self.reasons: list[str] = []

    def added(self, request, now): self.max_tokens.append(request.max_tokens)  # fmt: skip

    def planned(self, plan, now, lookahead): ...

    def updating(self, plan, results, now, seconds):
        self.reasons += [r.finish_reason for r in results if r.finish_reason]

    def restarted(self): ...


@pytest.mark.parametrize(
    ("max_tokens", "pages", "caps", "reasons"),
    [
        (None, 256, [502, 500], ["stop", "stop"]),  # what the context of 512 leaves
        (None, 10, [150, 148], ["stop", "stop"]),  # what 160 positions leave
        ([30, 5], 256, [30, 5], ["stop", "length"]),
    ],
)
def test_a_request_ends_at_its_true_length_below_its_max_tokens(max_tokens, pages, caps, reasons):
    seen, under_test = Seen(), scheduler(1, pages=pages)
    under_test.observers.append(seen)
    served = Simulation(under_test, workload([0, 0], [10, 12], [7, 5], max_tokens), Linear(1.0)).run()
    assert (seen.max_tokens, seen.reasons) == (caps, reasons) and served.finished.tolist() == [7, 12]


def test_an_output_longer_than_the_default_is_not_cut():
    long = SchedulerConfig(1, 64, 8192, None, 64)
    seen, under_test = Seen(), Scheduler(long, PagePool(512, 16))
    under_test.observers.append(seen)
    Simulation(under_test, workload([0, 0], [1, 1], [3000, 5]), Linear(1.0)).run()
    assert seen.max_tokens == [3000, MAX_TOKENS]


def test_max_tokens_below_the_output_are_refused():
    with pytest.raises(ValueError, match="max_tokens"):
        workload([0], [1], [5], [4])
    cut = workload([0, 0], [1, 1], [9, 2]).cut(4)
    assert cut.output.tolist() == [4, 2] and cut.caps.tolist() == [4, 4]


def test_without_a_predictor_the_shortest_is_not_known():
    policy = PolicyConfig(order="sjf")
    limits = SchedulerConfig(1, 64, 4096, None, 64, policy)
    served = Simulation(Scheduler(limits, PagePool(512, 16)), workload([0, 0], [4, 4], [9, 2]), Linear(1.0)).run()
    assert served.finished.tolist() == [9, 11]
