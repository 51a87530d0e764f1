"""Routing policies against plain reckonings: what each may choose, and when it may not."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sched.routing import NoReplica, Replica, ReplicaReport, RoutedRequest, make_routing, routing_names
from jaxspec.sched.routing.candidates import Candidates
from jaxspec.sched.routing.forecast import forecast
from jaxspec.sched.routing.recent_prefixes import RecentPrefixes
from jaxspec.sched.slo import NONE, Slo


def report(
    time: float = 0.0, running: int = 0, waiting: int = 0, slots: int = 8, prompt: int = 0, output: float = 0.0,
    step: float = 0.02, prefixes: frozenset[int] = frozenset(), tightest: float | None = None,
) -> ReplicaReport:  # fmt: skip
    return ReplicaReport(
        time, running, waiting, slots, prompt, output, step / 20, step, step / 50, tightest_tpot=tightest, page_size=16,
        prefixes=prefixes,
    )  # fmt: skip


def replica(name: str, **load: object) -> Replica:
    return Replica(name, report(**load))  # type: ignore[arg-type]


def request(
    name: str = "x", prompt: int = 64, expected: float | None = 20.0, keys: tuple[int, ...] = (), slo: Slo = NONE
) -> RoutedRequest:
    return RoutedRequest(name, prompt, 256, keys, expected, slo)


loads = st.fixed_dictionaries({
    "running": st.integers(0, 8), "waiting": st.integers(0, 5), "prompt": st.integers(0, 500),
    "output": st.floats(0, 900), "prefixes": st.frozensets(st.integers(0, 5)),
})  # fmt: skip
fleets = st.lists(loads, min_size=1, max_size=30)


@given(fleets, st.integers(0, 2**30), st.lists(st.integers(0, 5), max_size=4, unique=True))
@settings(max_examples=40, deadline=None)
def test_every_policy_chooses_one_of_those_given(fleet: list[dict[str, object]], seed: int, keys: list[int]) -> None:
    for name in routing_names():
        routing = make_routing(name, Random(seed))
        replicas = [replica(str(i), **load) for i, load in enumerate(fleet)]
        for i in range(12):
            chosen = routing.choose(request(str(i), keys=tuple(keys)), replicas, 0.01 * i)
            assert any(chosen is one for one in replicas)
            chosen.sent(request(str(i)), 0.01 * i)


@pytest.mark.parametrize("name", routing_names())
def test_equal_replicas_share_the_work(name: str) -> None:
    """Also of more than are looked at: not the first ones over and over."""
    routing, replicas = make_routing(name, Random(0)), tuple(replica(str(i)) for i in range(40))
    used = Counter[str]()
    for i in range(200):
        now = 0.05 * i
        chosen = routing.choose(request(str(i)), replicas, now)
        chosen.sent(request(str(i)), now)
        chosen.ended(str(i), now)  # before the next one comes: all are equally loaded again
        used[chosen.name] += 1
    assert len(used) > 30 and max(used.values()) < 20


@pytest.mark.parametrize("name", routing_names())
def test_without_replicas_there_is_an_error(name: str) -> None:
    with pytest.raises(NoReplica, match="no replica is left"):
        make_routing(name, Random(0)).choose(request(), [], 0.0)


@pytest.mark.parametrize("name", routing_names())
def test_replicas_that_have_not_reported_get_requests_too(name: str) -> None:
    routing, replicas = make_routing(name, Random(0)), [Replica("a"), Replica("b")]
    for i in range(20):
        routing.choose(request(str(i)), replicas, 0.0).sent(request(str(i)), 0.0)
    assert all(one.outstanding for one in replicas)


@given(fleets)
@settings(max_examples=60, deadline=None)
def test_least_loaded_is_the_least_loaded(fleet: list[dict[str, object]]) -> None:
    replicas = [replica(str(i), **load) for i, load in enumerate(fleet)]
    chosen = make_routing("least_loaded", Random(0)).choose(request(), replicas, 0.0)
    assert chosen.requests == min(one.requests for one in replicas)


@given(fleets, st.integers(0, 2**30))
@settings(max_examples=60, deadline=None)
def test_power_of_two_never_takes_the_most_loaded_of_several(fleet: list[dict[str, object]], seed: int) -> None:
    replicas = [replica(str(i), **load) for i, load in enumerate(fleet)]
    chosen = make_routing("power_of_two", Random(seed)).choose(request(), replicas, 0.0)
    most = max(replicas, key=lambda one: one.requests)
    alone = sum(one.requests == most.requests for one in replicas) == 1
    assert len(replicas) == 1 or not (alone and chosen is most)


@given(st.lists(loads, min_size=1, max_size=16), st.lists(st.integers(0, 5), max_size=4, unique=True))
@settings(max_examples=100, deadline=None)
def test_predicted_takes_the_best_forecast_of_fresh_reports(fleet: list[dict[str, object]], keys: list[int]) -> None:
    replicas = [replica(str(i), **load) for i, load in enumerate(fleet)]
    asked = request(keys=tuple(keys), slo=Slo(ttft=0.4, tpot=0.025))
    chosen = make_routing("predicted", Random(1), {"ttft_weight": 1.0}).choose(asked, replicas, 0.0)
    found = forecast(asked, chosen, 0.0)
    others = [forecast(asked, one, 0.0) for one in replicas]
    assert found.met == any(one.met for one in others)
    assert found.end <= min(one.end for one in others if one.met == found.met) + 1e-9


def test_a_forecast_is_the_sum_of_what_stands_before() -> None:
    asked = request(prompt=64, expected=11.0)
    idle = forecast(asked, replica("a"), 0.0)
    assert (idle.first, idle.end) == pytest.approx((64 * 0.001 + 0.02, 64 * 0.001 + 0.02 + 10 * 0.02))
    # Half of the prompt is cached.
    cached = forecast(request(keys=(1, 2, 3, 4), expected=11.0), replica("a", prefixes=frozenset({1, 2, 4})), 0.0)
    assert cached.first == pytest.approx(32 * 0.001 + 0.02)
    # All eight slots are taken and two wait: three of ten must end, which is three tenths of their 500 tokens.
    full = replica("a", running=8, waiting=2, output=500.0, prompt=100)
    seconds = 0.02 + 7 * 0.0004
    assert forecast(asked, full, 0.0).first == pytest.approx(0.3 * 500 / 8 * seconds + 164 * 0.001 + seconds)


def test_the_admission_answer() -> None:
    slow, quick = replica("slow", step=0.06), replica("quick", running=4)
    assert (
        forecast(request(slo=Slo(tpot=0.05)), quick, 0.0).met
        and not forecast(request(slo=Slo(tpot=0.05)), slow, 0.0).met
    )
    assert not forecast(request(slo=Slo(ttft=0.08)), quick, 0.0).met
    # A request must not break what others were promised.
    promised = replica("promised", tightest=0.0225)
    assert forecast(request(), promised, 0.0).met
    promised.sent(request("y"), 0.0)
    assert not forecast(request(), promised, 0.0).met
    # The replica that meets it is taken, although the request would end earlier elsewhere.
    early = replica("early", tightest=0.02)
    assert make_routing("predicted", Random(0)).choose(request(), [early, quick], 0.0) is quick


def test_stale_reports_fall_back_to_power_of_two_choices() -> None:
    routing = make_routing("predicted", Random(0), {"stale_after": 1.0})
    replicas = [replica("a", running=8, waiting=9, output=1e4), replica("b", running=1), replica("c", running=8)]
    assert {routing.choose(request(), replicas, 0.5).name for _ in range(30)} == {"b"}
    late = Counter(routing.choose(request(), replicas, 5.0).name for _ in range(60))
    assert late["a"] == 0 and late["b"] > late["c"] > 0


def test_old_reports_count_less() -> None:
    """By its reports a is better, by the number of requests b: while the reports are fresh a is chosen, later b."""
    routing = make_routing("predicted", Random(0), {"stale_after": 10.0, "ttft_weight": 1.0})
    replicas = [replica("a", step=0.01, running=5), replica("b", step=0.02, running=1)]
    chosen = [routing.choose(request(), replicas, age).name for age in (0.0, 1.0, 8.0, 9.9)]
    assert chosen == ["a", "a", "b", "b"]


def test_prefix_aware_follows_the_prefix_while_the_load_is_even() -> None:
    routing = make_routing("prefix_aware", Random(0))
    keys = (1, 2, 3)
    holder, other = replica("holder", running=3, prefixes=frozenset(keys)), replica("other", running=1)
    assert routing.choose(request(keys=keys), [other, holder], 0.0) is holder
    assert routing.choose(request(keys=(9,)), [other, holder], 0.0) is other
    overloaded = replica("holder", running=8, waiting=4, prefixes=frozenset(keys))
    assert routing.choose(request(keys=keys), [other, overloaded], 0.0) is other


def test_round_robin_takes_turns() -> None:
    routing, replicas = make_routing("round_robin", Random(0)), [Replica(str(i)) for i in range(3)]
    assert [routing.choose(request(), replicas, 0.0).name for _ in range(6)] == ["0", "1", "2"] * 2


def test_unknown_names_and_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="best is not one of"):
        make_routing("best", Random(0))
    with pytest.raises(ValueError, match="round_robin has no settings"):
        make_routing("round_robin", Random(0), {"x": 1})
    with pytest.raises(ValueError, match="stale"):
        make_routing("predicted", Random(0), {"stale": 1})


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=5)), max_size=20), st.data())
@settings(max_examples=60, deadline=None)
def test_recent_prefixes_find_the_longest_known_beginning(
    sent: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    index, replicas = RecentPrefixes(each=8), [Replica(str(i)) for i in range(4)]

    def keys(content: list[int]) -> list[int]:  # as hashes of prefixes: equal where the whole beginning is
        return [hash(tuple(content[: i + 1])) for i in range(len(content))]

    for place, content in sent:
        index.add(keys(content), replicas[place])
    asked = data.draw(st.lists(st.integers(0, 3), max_size=5))
    known = [content for _, content in sent]
    length = max((n for n in range(len(asked) + 1) if any(one[:n] == asked[:n] for one in known)), default=0)
    holders = {str(place) for place, content in sent if length and content[:length] == asked[:length]}
    found = [one.name for one in index.find(keys(asked))]
    assert set(found[: len(holders)]) == holders and len(set(found)) == len(found)


def test_recent_prefixes_forget_the_oldest() -> None:
    index, one = RecentPrefixes(capacity=4), Replica("a")
    index.add((1, 2, 3), one)
    index.add((7, 8), one)
    assert len(index) == 4 and index.find((1, 2, 3)) == [one] and index.find((3,)) == []


def test_of_many_replicas_the_candidates_are_few_and_the_right_ones() -> None:
    replicas = tuple(replica(str(i), running=5) for i in range(200))
    for i in (17, 91):
        replicas[i].update(report(time=0.0, running=1))
    candidates = Candidates(Random(0))
    candidates.chose(request(keys=(5, 6)), replicas[120])
    found = candidates.among(request(keys=(5, 6, 7)), replicas, 1.0)
    assert len(found) <= 16 and {"17", "91", "120"} <= {one.name for one in found}
    # A replica that gets no requests is no candidate, though it was sent the prefix.
    rest = tuple(one for one in replicas if one.name != "120")
    assert "120" not in {one.name for one in candidates.among(request(keys=(5, 6, 7)), rest, 1.0)}
    assert candidates.among(request(), replicas[:16], 1.0) == replicas[:16]
