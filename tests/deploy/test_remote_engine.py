"""The remote engine: requests go on elsewhere when replicas fail, without a token too many or too few."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.fake_fleet import FakeFleet, FakeReplica, recited, remote
from jaxspec.deploy.lengths import ExpectedLengths
from jaxspec.deploy.messages import Refused
from jaxspec.deploy.remote_engine import RemoteEngine
from jaxspec.errors import EngineDead, EngineDraining, InvalidRequest
from jaxspec.outputs import OutputDelta
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.admission import SloRefused
from jaxspec.sched.scheduler import QueueFull
from jaxspec.sched.slo import Slo

PROMPT = (5, 6, 7)
FULL = Refused("queue_full", "full")


class Client:
    """Collects the deltas of one request."""

    def __init__(self, engine: RemoteEngine, params: SamplingParams | None = None, **more: Any) -> None:
        self.deltas: list[OutputDelta] = []
        self.params = params or SamplingParams(seed=3, max_tokens=8)
        self._ended = asyncio.Event()
        self.id = engine.submit(PROMPT, self.params, self._take, **more)

    def _take(self, delta: OutputDelta) -> None:
        assert not self._ended.is_set(), "nothing follows the last delta"
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self._ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    async def end(self) -> OutputDelta:
        await asyncio.wait_for(self._ended.wait(), 30)
        return self.deltas[-1]

    async def all_came(self) -> None:
        assert (await self.end()).finish_reason == "length"
        assert self.tokens == recited(PROMPT, self.params.seed, 8)
        assert "".join(delta.text for delta in self.deltas) == "".join(f"<{token}>" for token in self.tokens)


def run(fleet: FakeFleet, scenario: Callable[[RemoteEngine], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        engine = remote(fleet, **settings)
        if fleet.listed:  # else polling waits for a replica, for seconds
            await engine.replicas.poll()
        engine.start()
        try:
            await scenario(engine)
        finally:
            await engine.close()
            await asyncio.sleep(0)

    asyncio.run(main())


async def served(engine: RemoteEngine) -> None:
    await Client(engine).all_came()


@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("way", ["fails_at", "stops_at", "dead"])
def test_a_lost_replicas_request_goes_on_elsewhere(at: int, way: str) -> None:
    first, second = FakeReplica(), FakeReplica()
    setattr(first, "fails_at" if way == "dead" else way, at)
    run(FakeFleet(a=first, b=second), served)
    (begun,), (resumed,) = first.submissions, second.submissions
    assert resumed.params == begun.params and resumed.id != begun.id
    assert 0 <= begun.waited <= resumed.waited if not resumed.resumed else resumed.waited >= 0
    expected = None if at == 0 else tuple(recited(PROMPT, 3, at - 1))
    assert resumed.resumed == expected, "what was admitted is not refused again"


@given(st.lists(st.integers(0, 9), max_size=3), st.integers(0, 9))
def test_however_often_it_is_lost(losses: list[int], last: int) -> None:
    replicas = {f"r{i}": FakeReplica(fails_at=at) for i, at in enumerate([*losses, last])}
    run(FakeFleet(**replicas, z=FakeReplica()), served, max_attempts=9)


def test_an_output_that_does_not_follow_is_a_loss() -> None:
    fleet = FakeFleet(a=FakeReplica(skips=True), b=FakeReplica())
    run(fleet, served)
    assert fleet.replicas["b"].submissions[0].resumed == tuple(recited(PROMPT, 3, 2))


def test_a_seed_is_chosen_where_none_is_given() -> None:
    async def scenario(engine: RemoteEngine) -> None:
        await Client(engine, SamplingParams(max_tokens=8)).end()

    fleet = FakeFleet(a=FakeReplica(fails_at=4), b=FakeReplica())
    run(fleet, scenario)
    (begun,), (resumed,) = (fleet.replicas[name].submissions for name in "ab")
    assert begun.params.seed is not None and begun.params.seed == resumed.params.seed


def test_a_refusal_leads_to_the_next_one() -> None:
    fleet = FakeFleet(a=FakeReplica(refusal=FULL), b=FakeReplica(refusal=Refused("lost")), c=FakeReplica())
    run(fleet, served)
    assert [len(replica.submissions) for replica in fleet.replicas.values()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("refusals", "kind"),
    [
        ([FULL, FULL], QueueFull),
        ([Refused("slo", "no"), FULL], SloRefused),
        ([Refused("invalid", "wrong", "stop"), FULL], InvalidRequest),
    ],
)
def test_the_client_is_refused_when_all_refuse(refusals: list[Refused], kind: type[Exception]) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        last = await Client(engine).end()
        assert last.finish_reason == "error" and isinstance(last.refused, kind)
        assert last.error == refusals[0].message

    run(FakeFleet(a=FakeReplica(refusal=refusals[0]), b=FakeReplica(refusal=refusals[1])), scenario)


def test_who_refused_a_request_may_go_on_with_it() -> None:
    """Once it is admitted: the replica that was full takes it over from the lost one."""
    fleet = FakeFleet(a=FakeReplica(refusal=FULL), b=FakeReplica(fails_at=4))

    async def scenario(engine: RemoteEngine) -> None:
        await Client(engine).all_came()

    run(fleet, scenario)
    assert [len(fleet.replicas[name].submissions) for name in "ab"] == [2, 1]


def test_the_replacement_of_the_only_replica_is_found() -> None:
    """Though without replicas no call goes out that would tell of it."""
    fleet = FakeFleet(a=FakeReplica(hangs=True))

    async def scenario(engine: RemoteEngine) -> None:
        client = Client(engine)
        while engine.replicas.router.replicas["a"].outstanding == 0:
            await asyncio.sleep(0.01)
        fleet.replicas["a"].dead = True
        fleet.listed = set()
        while engine.replicas.router.replicas:
            await asyncio.sleep(0.01)
        assert engine.health == "ok", "requests wait for a replica"
        fleet.replicas["b"] = FakeReplica()
        fleet.listed = {"b"}
        while not engine.replicas.router.replicas:
            await asyncio.sleep(0.01)
        await Client(engine).all_came()
        engine.cancel(client.id)

    run(fleet, scenario)


def test_a_request_that_loses_every_replica_fails() -> None:
    async def scenario(engine: RemoteEngine) -> None:
        last = await Client(engine).end()
        assert isinstance(last.refused, EngineDead) and "3 replicas were lost" in str(last.error)

    run(FakeFleet(**{f"r{i}": FakeReplica(fails_at=1) for i in range(5)}), scenario, max_attempts=3)


def test_requests_wait_for_a_replica() -> None:
    fleet = FakeFleet()

    async def scenario(engine: RemoteEngine) -> None:
        while engine.health == "ok":
            await asyncio.sleep(0.1)
        assert (engine.health, engine.failure) == ("dead", "no replica is running")
        client = Client(engine)
        await asyncio.sleep(0.05)
        fleet.replicas["a"] = FakeReplica()
        fleet.listed = {"a"}
        await client.all_came()
        assert (engine.health, engine.failure) == ("ok", None)

    run(fleet, scenario, patience_s=2.0)


def test_but_not_for_ever() -> None:
    async def scenario(engine: RemoteEngine) -> None:
        last = await Client(engine).end()
        assert isinstance(last.refused, EngineDead) and last.error == "no replica is running"

    run(FakeFleet(), scenario, patience_s=0.05)


def test_the_only_replica_may_be_lost_for_a_while() -> None:
    fleet = FakeFleet(a=FakeReplica(fails_at=3))

    async def scenario(engine: RemoteEngine) -> None:
        client = Client(engine)
        while not fleet.replicas["a"].closed:
            await asyncio.sleep(0)
        fleet.replicas["a"].fails_at = None
        await client.all_came()

    run(fleet, scenario)
    assert len(fleet.replicas["a"].submissions) == 2


def test_a_silent_replica_loses_its_requests() -> None:
    hung = FakeReplica(hangs=True, silent=True)
    fleet, begun = FakeFleet(a=hung, b=FakeReplica()), time.monotonic()

    async def scenario(engine: RemoteEngine) -> None:
        client = Client(engine)
        while not hung.submissions:
            await asyncio.sleep(0)
        engine.give_up()
        await asyncio.sleep(0)
        assert not hung.closed, "it may still answer"
        await client.all_came()

    run(fleet, scenario, clock=lambda: 30 * (time.monotonic() - begun), give_up_after_s=15)
    assert hung.closed and fleet.replicas["b"].submissions[0].resumed == ()


def test_a_silent_replica_loses_its_requests_although_none_is_listed() -> None:
    hung = FakeReplica(hangs=True, silent=True)
    fleet, begun = FakeFleet(a=hung), time.monotonic()

    async def scenario(engine: RemoteEngine) -> None:
        client = Client(engine)
        while not hung.submissions:
            await asyncio.sleep(0)
        fleet.listed.clear()
        engine.replicas.remove("a")  # from now on a poll waits for another one
        end = await asyncio.wait_for(client.end(), 10)
        assert end.finish_reason == "error" and hung.closed

    run(fleet, scenario, clock=lambda: 30 * (time.monotonic() - begun), give_up_after_s=15, patience_s=0.1)


def test_a_slow_request_stays_where_reports_come_from() -> None:
    hung, now = FakeReplica(hangs=True), [0.0]

    async def scenario(engine: RemoteEngine) -> None:
        client = Client(engine)
        while not hung.submissions:
            await asyncio.sleep(0)
        now[0] = 16.0
        await engine.replicas.poll()
        engine.give_up()
        await asyncio.sleep(0.05)
        assert not hung.closed
        engine.cancel(client.id)
        await client.end()

    run(FakeFleet(a=hung, b=FakeReplica()), scenario, clock=lambda: now[0])


def test_cancelling_ends_it_on_the_replica() -> None:
    hung = FakeReplica(hangs=True)

    async def scenario(engine: RemoteEngine) -> None:
        client, early = Client(engine), Client(engine)
        engine.cancel(early.id)  # its task has not begun
        assert (await early.end()).finish_reason == "abort"
        while not hung.submissions:
            await asyncio.sleep(0)
        engine.cancel(client.id)
        assert (await client.end()).finish_reason == "abort"
        await asyncio.sleep(0.01)
        engine.cancel("unknown")

    run(FakeFleet(a=hung), scenario)
    assert len(hung.submissions) == len(hung.closed) == 1


def test_a_replica_that_is_no_longer_listed_ends_its_requests() -> None:
    first = FakeReplica()
    fleet = FakeFleet(a=first, b=FakeReplica())

    async def scenario(engine: RemoteEngine) -> None:
        client = Client(engine)
        while not client.tokens:
            await asyncio.sleep(0)
        fleet.listed = {"b"}
        for _ in range(2):  # the first one's calls tell of it
            await engine.replicas.poll()
        after = Client(engine)
        await client.all_came()
        await after.all_came()

    run(fleet, scenario)
    assert len(first.submissions) == 1 and not first.closed and len(fleet.replicas["b"].submissions) == 1


def test_a_replica_that_is_absent_is_no_loss() -> None:
    async def scenario(engine: RemoteEngine) -> None:
        await Client(engine).all_came()
        assert engine.counts.lost == 0 and engine.replicas.router.replicas.keys() == {"b"}

    run(FakeFleet(a=FakeReplica(refusal=Refused("absent")), b=FakeReplica()), scenario, max_attempts=1)


def test_a_dead_replica_is_not_asked_again() -> None:
    fleet = FakeFleet(a=FakeReplica(dead=True), b=FakeReplica())

    async def scenario(engine: RemoteEngine) -> None:
        await engine.replicas.poll()
        assert engine.replicas.router.replicas.keys() == {"b"}
        await Client(engine).all_came()

    run(fleet, scenario)
    assert not fleet.replicas["a"].submissions


def test_health_is_known_without_requests() -> None:
    fleet, now = FakeFleet(a=FakeReplica(), b=FakeReplica()), [100.0]

    async def main() -> None:
        engine = remote(fleet, clock=lambda: now[0], give_up_after_s=0.02)

        async def state(after: float) -> str:
            now[0] += after
            await engine.replicas.poll()
            return engine.replicas.router.health.state(engine.replicas.router.replicas["b"]).value

        assert await state(0.0) == "healthy"
        fleet.replicas["b"].silent = True
        assert await state(5.0) == "out"
        fleet.replicas["b"].silent = False
        while engine.replicas.heard("b") < now[0]:  # the question that it did not answer is given up first
            await state(0.0)
        for after, expected in ((20.0, "probation"), (1.0, "probation"), (1.0, "probation"), (1.0, "healthy")):
            assert await state(after) == expected
            await Client(engine).all_came()  # one request between two checks
        await engine.close()

    asyncio.run(main())


def test_what_is_observed() -> None:
    """Times are those of the ingress; of a replica's clock only differences count."""
    lengths, seen, now = ExpectedLengths(), list[Any](), [100.0]

    async def main() -> None:
        engine = remote(FakeFleet(a=FakeReplica(fails_at=5), b=FakeReplica()), lengths, clock=lambda: now[0])
        engine.observers.append(lambda metrics, reason: seen.append((metrics, reason)))
        engine.first_token_observers.append(lambda metrics: seen.append("first"))
        engine.token_observers.append(lambda seconds, count: seen.append(count))
        engine.observers.append(lambda metrics, reason: seen[99])  # fails, which is logged only
        await engine.replicas.poll()
        last = await Client(engine, slo=Slo(tpot=1.0)).end()
        await asyncio.sleep(0)
        m = last.metrics
        assert m is not None and seen == ["first", *[1] * 6, (m, "length"), 1]
        assert (m.arrival, m.first_scheduled, m.first_token, m.finished) == (100.0, 100.5, 100.0, 100.0)
        assert (m.prompt_tokens, m.cached_tokens, m.output_tokens, m.resumed_tokens) == (3, 3, 8, 0)
        assert m.slo == Slo(tpot=1.0) and m.tpot_attained
        stats = engine.stats()
        assert (stats.running, stats.kv_pages, stats.kv_usage, stats.accepted_by_level) == (2, 20, 0.5, (4, 2))
        await engine.close()

    asyncio.run(main())


def test_what_is_wrong_at_once_is_raised_at_once() -> None:
    async def scenario(engine: RemoteEngine) -> None:
        with pytest.raises(InvalidRequest, match="empty"):
            engine.submit((), SamplingParams(), lambda _: None)
        with pytest.raises(InvalidRequest, match="logit_bias"):
            engine.submit((3,), SamplingParams(logit_bias={257: 1.0}), lambda _: None)
        client = Client(engine, request_id="x")
        with pytest.raises(InvalidRequest, match="already"):
            Client(engine, request_id="x")
        await client.all_came()
        await engine.close()
        assert engine.health == "draining"
        with pytest.raises(EngineDraining):
            Client(engine)

    run(FakeFleet(a=FakeReplica()), scenario)


def test_closing_gives_requests_time() -> None:
    async def main() -> None:
        engine = remote(FakeFleet(a=FakeReplica()))
        await engine.replicas.poll()
        client = Client(engine)
        await engine.close(timeout=30)
        await client.all_came()

    asyncio.run(main())
