"""Replicas as the router sees them, their health, and the router."""

from __future__ import annotations

import pickle
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sched import PagePool, Request, RequestResult, Scheduler, SchedulerConfig
from jaxspec.sched.routing import (
    Health,
    HealthSettings,
    NoReplica,
    Replica,
    ReplicaReport,
    RoutedRequest,
    Router,
    make_routing,
    prefix_keys,
    report_of,
)
from jaxspec.sched.routing.health import HealthState
from jaxspec.sched.slo import Slo
from jaxspec.sched.timing import StepTimes

IDLE = ReplicaReport(0.0, 0, 0, 4, 0, 0.0, 0.001, 0.02)


def request(name: str, prompt: int = 32, expected: float = 10.0, keys: tuple[int, ...] = ()) -> RoutedRequest:
    return RoutedRequest(name, prompt, 64, keys, expected)


def scheduler(times: StepTimes | None = None) -> Scheduler:
    return Scheduler(SchedulerConfig(2, 64, 512, None, 64, times=times), PagePool(64, 16))


def step(under_test: Scheduler, now: float) -> None:
    plan = under_test.plan(now)
    under_test.update(plan, [RequestResult((7,) if one.samples else ()) for one in plan.scheduled], now, 0.02)


def test_a_report_counts_the_work_that_is_left() -> None:
    replica = scheduler(StepTimes({1: 0.02, 2: 0.03, 64: 0.64}, position=0.001))
    for i, (length, predicted) in enumerate(((80, 50.0), (40, 30.0), (20, 5.0))):
        one = Request(str(i), length, [i] * length, 60, 0.0, slo=Slo(tpot=0.1 + i), predicted_len=predicted)
        replica.add(one, 0.0)
    step(replica, 0.0)
    found = report_of(replica, 1.5)
    # 64 tokens of the first prompt are computed; the second one has a slot, the third one waits.
    assert (found.time, found.running, found.waiting, found.slots) == (1.5, 1, 2, 2)
    assert (found.prompt_tokens, found.output_tokens, found.tightest_tpot) == (16 + 40 + 20, 85.0, 0.1)
    assert found.seconds_per_prompt_token == pytest.approx(0.01)
    each = (80 + 40 + 20) / 3
    assert found.seconds_per_step == pytest.approx(0.02 + 0.001 * each)
    assert found.seconds_per_request == pytest.approx(0.01 + 0.001 * each)
    assert found.token_seconds(2) == pytest.approx(0.03 + 0.002 * each) == found.token_seconds(9)
    queued = Request("3", 8, [0] * 8, 60, 0.0, predicted_len=2.0)
    assert report_of(replica, 1.5, queued=[queued]).waiting == 3
    assert report_of(replica, 1.5, 2.0).token_seconds(1) == pytest.approx(found.token_seconds(1) / 2)
    assert pickle.loads(pickle.dumps(found)) == found
    assert set(prefix_keys([0] * 80, 16)[:4]) == found.prefixes


def test_a_report_without_a_profile_or_predictions_has_guesses() -> None:
    replica = scheduler()
    replica.add(Request("0", 40, [0] * 40, 60, 0.0), 0.0)
    found = report_of(replica, 0.0)
    assert found.seconds_per_step > 0 and found.seconds_per_prompt_token > 0
    assert 1 <= found.output_tokens <= 60


def test_prefix_keys_are_those_of_the_page_pool() -> None:
    tokens = list(range(50))
    pool = PagePool(8, 16)
    pages = pool.allocate(3)
    pool.register(tokens, pages, range(3))
    pool.release(pages)
    replica = Replica("a", replace(IDLE, prefixes=frozenset(int.from_bytes(k[:8], "big") for k in pool.recent_keys(8))))
    assert replica.cached_tokens(RoutedRequest("x", 50, 9, prefix_keys(tokens, 16))) == 48 == pool.cached(tokens, 49)
    assert len(prefix_keys(tokens[:48], 16)) == 2 and len(prefix_keys(tokens, 16, most=1)) == 1
    assert replica.cached_tokens(RoutedRequest("x", 50, 9, prefix_keys([1, *tokens], 16))) == 0
    # Of more pages than fit a report, those in use and the last used come first.
    assert pool.recent_keys(2) == pool.recent_keys(3)[:2]


def test_recent_keys_are_those_in_use_and_the_last_used() -> None:
    pool = PagePool(8, 2)
    for i in range(4):
        pages = pool.allocate(1)
        pool.register([i, i], pages, range(1))
        pool.release(pages)
    held = pool.match([0, 0], 2)
    names = {key: i for i in range(4) for key in [bytes(k) for k in _keys([i, i])]}
    assert [names[key] for key in pool.recent_keys(3)] == [0, 3, 2]
    pool.release(held)
    assert [names[key] for key in pool.recent_keys(2)] == [0, 3]


def _keys(tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    PagePool(1, 2).cached(tokens, 2, keys)
    return keys


events = st.lists(st.sampled_from(["send", "report", "end", "first"]), max_size=40)


@given(events, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_replica_counts_as_a_list_does(names: list[str], random: Random) -> None:
    """Against the plain list of what is there: the report counts what was sent before it."""
    replica, now, live, work = Replica("a", IDLE), 0.0, list[RoutedRequest](), list[RoutedRequest]()
    for i, name in enumerate(names):
        now += 1.0
        if name == "send":
            one = request(str(i), 16 + i, 5.0 + i, keys=(i % 3,))
            replica.sent(one, now)
            live.append(one)
            work.append(one)
        elif name == "report":
            replica.update(replace(IDLE, time=now, running=len(live), prefixes=frozenset()))
            work.clear()
        elif live:
            one = live.pop(random.randrange(len(live))) if name == "end" else random.choice(live)
            if name == "end":
                replica.ended(one.id, now)
                work = [other for other in work if other is not one]
            else:
                replica.first_token(one.id, now)
        assert replica.requests == replica.outstanding == len(live)
        prompt, output = replica.work(now)
        assert output == pytest.approx(sum(one.expected_tokens or 0 for one in work))
        assert prompt <= sum(one.prompt_len for one in work)
        kept = {key for one in live for key in one.page_keys}
        assert all(bool(replica.cached_pages(request("y", keys=(key,)))) == (key in kept) for key in range(3))


def test_a_report_ages() -> None:
    busy = replace(IDLE, running=2, prompt_tokens=100, output_tokens=50.0)
    replica = Replica("a", busy)
    assert replica.work(0.0) == (100, 50)
    assert replica.work(0.06) == pytest.approx((40, 50))
    # After the prompts two requests decode, with 20 ms per token.
    assert replica.work(0.3) == pytest.approx((0, 50 - 2 * 0.2 / 0.02))
    assert replica.work(9.0) == (0, 0) and replica.age(9.0) == 9.0
    replica.update(replace(IDLE, time=-1.0))
    assert replica.report is busy, "an older report is ignored"


def fleet(router: Router, count: int, now: float = 0.0) -> None:
    for i in range(count):
        router.add(str(i))
        router.update(str(i), replace(IDLE, time=now))


def serve(router: Router, names: list[str], now: float, seconds: dict[str, float]) -> None:
    """Each replica gets a request and answers it after its seconds."""
    for name in names:
        one = f"{name} at {now}"
        router.replicas[name].sent(request(one), now, 0.1)
        router.replicas[name].first_token(one, now + seconds.get(name, 0.1))
        router.replicas[name].ended(one, now + seconds.get(name, 0.1))


def states(router: Router) -> dict[str, HealthState]:
    return {name: router.health.state(one) for name, one in router.replicas.items()}


def test_a_silent_replica_is_taken_out_and_comes_back() -> None:
    router = Router(make_routing("round_robin", Random(0)), Health(HealthSettings(out_for=5.0)))
    fleet(router, 3)
    for time in (2.0, 4.0):
        for name in "02":
            router.update(name, replace(IDLE, time=time))
    chosen = [router.route(request(f"a{i}"), 4.0).name for i in range(4)]
    assert "1" not in chosen and states(router)["1"] is HealthState.OUT
    for time in (6.0, 8.0, 10.0):
        for name in "012":
            router.update(name, replace(IDLE, time=time))
    chosen = [router.route(request(f"b{i}"), 10.0).name for i in range(6)]
    assert chosen.count("1") == 1, "on probation it gets one request at a time"
    one = next(f"b{i}" for i, name in enumerate(chosen) if name == "1")
    router.first_token(one, 10.05)
    router.ended(one, 10.2)
    serve(router, ["1", "1"], 10.3, {})
    router.route(request("c"), 11.0)
    assert states(router)["1"] is HealthState.HEALTHY


def test_a_slow_replica_is_taken_out_and_comes_back() -> None:
    router = Router(make_routing("least_loaded", Random(0)), Health(HealthSettings(out_for=5.0, silent_after=1e9)))
    fleet(router, 4)
    for i in range(6):
        serve(router, ["0", "1", "2", "3"], float(i), {"2": 2.0})
    router.route(request("a"), 7.0)
    assert states(router)["2"] is HealthState.OUT and list(states(router).values()).count(HealthState.HEALTHY) == 3
    router.route(request("b"), 12.5)
    assert states(router)["2"] is HealthState.PROBATION
    for i in range(3):
        serve(router, ["2"], 13.0 + i, {"2": 2.0})
    router.route(request("c"), 16.0)
    assert states(router)["2"] is HealthState.OUT, "it is still slow"
    router.route(request("d"), 22.0)
    for i in range(3):
        serve(router, ["2"], 22.1 + i, {})
    router.route(request("e"), 26.0)
    assert states(router)["2"] is HealthState.HEALTHY


@pytest.mark.parametrize("field", ["seconds_per_step", "seconds_per_prompt_token"])
def test_slow_steps_take_a_replica_out(field: str) -> None:
    router = Router(make_routing("round_robin", Random(0)))
    fleet(router, 4)
    router.update("3", replace(IDLE, time=0.1, **{field: 4 * getattr(IDLE, field)}))
    assert "3" not in {router.route(request(str(i)), 0.2).name for i in range(8)}


def test_a_replica_that_answers_nothing_is_slow() -> None:
    router = Router(make_routing("round_robin", Random(0)), Health(HealthSettings(silent_after=1e9)))
    fleet(router, 4)
    for i in range(6):
        serve(router, ["0", "1", "3"], float(i), {})
        router.replicas["2"].sent(request(f"lost {i}"), float(i), 0.1)
    router.route(request("a"), 9.0)
    assert states(router)["2"] is HealthState.OUT


def test_some_replicas_always_stay() -> None:
    router = Router(make_routing("round_robin", Random(0)))
    fleet(router, 6)
    for i, factor in enumerate((1, 1, 1, 10, 20, 30)):  # half of them are slow: at most a third is taken out
        router.update(str(i), replace(IDLE, time=0.1, seconds_per_step=0.02 * factor))
    router.route(request("a"), 0.2)
    assert list(states(router).values()).count(HealthState.OUT) == 2
    # All are silent: then it is the reports that do not come.
    quiet = Router(make_routing("round_robin", Random(0)))
    fleet(quiet, 3)
    assert {quiet.route(request(str(i)), 100.0).name for i in range(3)} == {"0", "1", "2"}


def test_somebody_is_left_when_one_is_silent_after_the_other() -> None:
    """Both are out, and one of them reports again: it takes the requests."""
    router = Router(make_routing("round_robin", Random(0)))
    fleet(router, 2)
    router.update("0", replace(IDLE, time=3.5))
    router.route(request("a"), 4.0)
    assert states(router) == {"0": HealthState.HEALTHY, "1": HealthState.OUT}
    router.update("1", replace(IDLE, time=7.0))
    assert {router.route(request(str(i)), 7.0 + 0.1 * i).name for i in range(4)} == {"1"}
    assert states(router) == {"0": HealthState.OUT, "1": HealthState.OUT}


def test_a_replica_on_probation_gets_the_next_request() -> None:
    """Whatever the policy prefers; one with an SLO only if no other comes."""
    router = Router(make_routing("predicted", Random(0)), Health(HealthSettings(silent_after=3.0, out_for=1.0)))
    fleet(router, 2)
    router.update("0", replace(IDLE, time=9.0))
    assert router.route(request("a"), 10.0).name == "0"
    for name in "01":  # its last step was long
        router.update(name, replace(IDLE, time=12.0, seconds_per_step=0.02 if name == "0" else 1.0))
    slo = Slo(tpot=1.0)
    assert router.route(replace(request("b"), slo=slo), 12.0).name == "0"
    assert states(router)["1"] is HealthState.PROBATION
    assert router.route(request("c"), 12.1).name == "1"
    assert router.route(request("d"), 12.2).name == "0", "one at a time"
    router.ended("c", 12.3)
    for name in "01":
        router.update(name, replace(IDLE, time=18.0, seconds_per_step=0.02 if name == "0" else 1.0))
    assert router.route(replace(request("e"), slo=slo), 13.0).name == "0"
    assert router.route(replace(request("f"), slo=slo), 18.5).name == "1", "no other came"


def test_a_request_can_exclude_replicas() -> None:
    router = Router(make_routing("round_robin", Random(0)))
    fleet(router, 2)
    assert {router.route(request(str(i)), 0.0, {"0"}).name for i in range(3)} == {"1"}
    with pytest.raises(NoReplica):
        router.route(request("x"), 0.0, {"0", "1"})


def test_the_router_forgets_what_is_gone() -> None:
    router = Router(make_routing("round_robin", Random(0)))
    with pytest.raises(NoReplica):
        router.route(request("a"), 0.0)
    fleet(router, 2)
    with pytest.raises(ValueError, match="'0' is here already"):
        router.add("0")
    first, second = router.route(request("a"), 0.0), router.route(request("b"), 0.0)
    with pytest.raises(ValueError, match="'a' was routed already"):
        router.route(request("a"), 0.0)
    assert router.remove(first.name) == ["a"]
    assert router.route(request("a"), 0.1) is second
    router.first_token("b", 0.2)
    router.ended("b", 0.3)
    router.ended("unknown", 0.3)
    assert second.outstanding == 1 and second.answered == 1
    with pytest.raises(KeyError):
        router.update(first.name, IDLE)


def test_settings_and_requests_are_checked() -> None:
    with pytest.raises(ValueError, match="silent_after"):
        HealthSettings(silent_after=0.0)
    with pytest.raises(ValueError, match="slow_factor"):
        HealthSettings(slow_factor=1.0)
    with pytest.raises(ValueError, match="most_out"):
        HealthSettings(most_out=1.0)
    with pytest.raises(ValueError, match="prompt_len"):
        RoutedRequest("x", 0, 1)
    with pytest.raises(ValueError, match="expected_tokens"):
        RoutedRequest("x", 1, 1, expected_tokens=float("nan"))
