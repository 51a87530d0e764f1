"""The timeline of simulated requests: its spans, by hand and against what the scheduler counts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sched import PagePool, PolicyConfig, Scheduler, SchedulerConfig, SwapCosts
from jaxspec.sched.sim.cost import Linear
from jaxspec.sched.sim.simulator import Served, Simulation
from jaxspec.sched.sim.timeline import Phase, Span, Timeline
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.waiting_reason import Obstacle


def watched(
    rows: list[tuple[float, int, int]], seqs: int = 4, tokens: int = 64, pages: int = 64, host: int = 0,
    ids: set[str] | None = None, **policy: object,
) -> tuple[dict[str, list[Span]], Served]:  # fmt: skip
    """The spans of requests (arrival, input, output) with steps of one second and pages of four tokens."""
    arrival, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    work = Workload(arrival.astype(float), inputs, outputs, np.full(len(rows), np.nan), max_tokens=outputs)
    costs = SwapCosts(0.1, 0.1, 0.1, 1.0)
    config = SchedulerConfig(seqs, tokens, 200, None, 64, PolicyConfig(**policy), host, costs=costs)  # type: ignore[arg-type]
    scheduler = Scheduler(config, PagePool(pages, 4, enable_prefix_caching=False))
    timeline = Timeline(scheduler, {str(i) for i in range(len(rows))} if ids is None else ids)
    served = Simulation(scheduler, work, Linear(1.0)).run()
    return timeline.spans, served


def test_one_slot_by_hand() -> None:
    spans, _ = watched([(0, 4, 3), (0.5, 4, 2), (9, 4, 1)], seqs=1)
    assert spans["0"] == [Span(0, 1, Phase.PREFILL), Span(1, 3, Phase.DECODE)]
    assert spans["1"] == [
        Span(0.5, 1, Phase.ARRIVED), Span(1, 3, Phase.WAITING, Obstacle.SLOT), Span(3, 4, Phase.PREFILL),
        Span(4, 5, Phase.DECODE),
    ]  # fmt: skip
    assert spans["2"] == [Span(9, 10, Phase.PREFILL)]
    assert spans["1"][1].label == "waiting: no free slot"


def test_pages_and_tokens_of_the_step_by_hand() -> None:
    # The second prompt needs four pages of the two that are left; the third one waits behind it.
    spans, _ = watched([(0, 16, 4), (0, 16, 2), (0, 4, 1)], pages=6)
    assert spans["1"][0] == Span(0, 4, Phase.WAITING, Obstacle.PAGES)
    assert spans["2"][0] == Span(0, 4, Phase.WAITING, Obstacle.PAGES)
    # A step of eight tokens: the first prompt takes two whole steps.
    spans, _ = watched([(0, 16, 2), (0, 4, 1)], tokens=8)
    assert spans["0"] == [Span(0, 2, Phase.PREFILL), Span(2, 3, Phase.DECODE)]
    assert spans["1"] == [Span(0, 2, Phase.WAITING, Obstacle.STEP), Span(2, 3, Phase.PREFILL)]


def test_a_request_that_loses_its_kv() -> None:
    # Each needs five pages at its end, and there are six: the later one is preempted, and computes its KV again.
    spans, served = watched([(0, 8, 12), (0, 8, 12)], pages=6)
    assert [span.phase for span in spans["0"]] == [Phase.PREFILL, Phase.DECODE]
    assert [span.phase for span in spans["1"]] == [
        Phase.PREFILL, Phase.DECODE, Phase.PREEMPTED, Phase.RECOMPUTE, Phase.DECODE,
    ]  # fmt: skip
    assert served.preemptions.tolist() == [0, 1]
    swapped, _ = watched([(0, 8, 12), (0, 8, 12)], pages=6, host=20, memory="swap")
    assert Phase.SWAPPED in {span.phase for span in swapped["1"]}


def test_a_request_that_loses_its_slot() -> None:
    spans, served = watched([(0, 4, 9), (2, 4, 1)], seqs=1, order="srpt", predictor="oracle")
    assert served.pauses == 1
    assert spans["0"] == [
        Span(0, 1, Phase.PREFILL), Span(1, 2, Phase.DECODE), Span(2, 3, Phase.PAUSED), Span(3, 10, Phase.DECODE),
    ]  # fmt: skip


POLICIES = (
    {}, {"order": "sjf", "predictor": "oracle"}, {"order": "srpt", "predictor": "oracle"}, {"order": "las"},
    {"order": "alise", "predictor": "oracle", "memory": "swap"}, {"batching": "dynamic", "max_batch_size": 3},
    {"memory": "defer", "predictor": "oracle"}, {"prefill": "first"},
)  # fmt: skip
REQUESTS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=15)


@given(
    REQUESTS.map(sorted), st.integers(1, 4), st.integers(4, 64), st.integers(18, 40), st.sampled_from((0, 30)),
    st.sampled_from(POLICIES),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_spans_partition_the_time_from_arrival_to_end(rows, seqs, tokens, pages, host, policy) -> None:
    spans, served = watched(rows, seqs, tokens, pages, host, **policy)
    assert list(spans) == [str(i) for i in range(len(rows))]
    for i, own in enumerate(spans.values()):
        assert (own[0].begin, own[-1].end) == (served.workload.arrival[i], served.finished[i])
        assert all(one.end == other.begin and one.label != other.label for one, other in pairwise(own))
        assert all(span.begin < span.end for span in own)
        assert all((span.obstacle is not None) == (span.phase is Phase.WAITING) for span in own)
        # It first runs when it is first scheduled, and the first token ends the prompt.
        waiting = (Phase.ARRIVED, Phase.WAITING)
        first = next(span.begin for span in own if span.phase not in waiting)
        assert first == served.first_scheduled[i]
        decodes = [span.begin for span in own if span.phase is Phase.DECODE]
        assert not decodes or min(decodes) >= served.first_token[i]
        phases = [span.phase for span in own]
        assert served.preemptions[i] or not {Phase.PREEMPTED, Phase.SWAPPED, Phase.RECOMPUTE} & {*phases}
        assert not served.preemptions[i] or host or Phase.PREEMPTED in phases
        assert served.pauses or host or Phase.PAUSED not in phases
    # Recording changes nothing.
    assert (
        watched(rows, seqs, tokens, pages, host, ids=set(), **policy)[1].finished.tolist() == served.finished.tolist()
    )


def test_only_the_asked_ones_are_recorded() -> None:
    rows = [(0.0, 4, 3)] * 5
    spans, _ = watched(rows, ids={"1", "3"})
    assert list(spans) == ["1", "3"] and spans["1"] == watched(rows)[0]["1"]
    assert watched(rows, ids=set())[0] == {}


@pytest.mark.parametrize("obstacle", Obstacle)
def test_every_obstacle_has_a_colour(obstacle: Obstacle) -> None:
    from jaxspec.bench.timeline_plot import PHASE_COLOURS, WAITING_COLOURS

    assert obstacle in WAITING_COLOURS and set(PHASE_COLOURS) == set(Phase)
