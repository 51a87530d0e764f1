"""Two real engines behind the remote engine, in one process: requests that are cut are as if they were not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from helpers import tiny
from helpers.generation import GREEDY, check_clean, params, prompts
from helpers.patience import PATIENCE
from helpers.serving import eventually
from jaxspec import LLM, SamplingParams, StructuredOutputs
from jaxspec.deploy.load import Load
from jaxspec.deploy.messages import Admitted, Message, ReplicaLost, Submission
from jaxspec.deploy.remote_engine import RemoteEngine
from jaxspec.deploy.replica import Replica
from jaxspec.deploy.settings import RoutingSettings
from jaxspec.errors import EngineDead
from jaxspec.outputs import OutputDelta
from jaxspec.sched.routing import HealthSettings, make_routing, routing_names
from jaxspec.sched.slo import Slo
from jaxspec.serve import tracing
from jaxspec.serve.app import ServerOptions, create_app

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

SIZES: dict[str, Any] = dict(
    page_size=16, max_num_seqs=4, token_buckets=[1, 16], max_num_batched_tokens=16, max_model_len=128,
    kv_cache_tokens=1024, compilation_cache_dir="",
)  # fmt: skip
#: A step of the tiny model takes as long as the machine happens to be busy.
NEVER_SLOW = HealthSettings(slow_factor=1e6)
special = st.sampled_from(
    [
        {}, {"stop": ["ab", "é"], "logit_bias": {b: 20.0 for b in "aébc".encode()}}, {"logprobs": 2},
        {"structured_outputs": StructuredOutputs(regex="(ab){3,5}c")}, {"n": 1, "seed": None, "temperature": 0.0},
    ]
)  # fmt: skip


class LocalFleet:
    """Engines of this process. `cuts`: how many messages each of the next streams has before it breaks."""

    def __init__(self, replicas: dict[str, Replica], cuts: list[int]) -> None:
        self.replicas, self.cuts = replicas, cuts

    async def names(self, fresh: bool = False) -> frozenset[str]:
        return frozenset(self.replicas)

    async def load(self, replica: str) -> Load:
        return await self.replicas[replica].load()

    async def generate(self, replica: str, submission: Submission) -> AsyncGenerator[Message, None]:
        left = self.cuts.pop() if self.cuts else -1
        async with aclosing(self.replicas[replica].generate(submission)) as messages:
            async for message in messages:
                if left == 0:
                    raise ReplicaLost("cut")
                left -= 1
                yield message


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LLM]]:
    with tiny.llm(draft=[], **SIZES) as one, tiny.llm(draft=["suffix"], tree="chain", **SIZES) as other:
        yield [one, other]


def serve(
    engines: list[LLM], requests: list[tuple[list[int], SamplingParams]], cuts: list[int], policy: str = "predicted"
) -> list[list[OutputDelta]]:
    """The deltas of each request."""

    async def main() -> list[list[OutputDelta]]:
        fleet = LocalFleet({f"r{i}": Replica(llm.engine) for i, llm in enumerate(engines)}, cuts)
        facts = fleet.replicas["r0"].facts()
        engine = RemoteEngine(
            fleet, facts, engines[0].tokenizer, make_routing(policy, Random(0)),
            RoutingSettings(report_every_s=0.05, max_attempts=100, health=NEVER_SLOW),
        )  # fmt: skip
        await engine.replicas.poll()
        engine.start()
        found: list[list[OutputDelta]] = [[] for _ in requests]
        ended = [asyncio.Event() for _ in requests]

        def taker(i: int) -> Any:
            def take(delta: OutputDelta) -> None:
                found[i].append(delta)
                if delta.finish_reason is not None:
                    ended[i].set()

            return take

        for i, (prompt, each) in enumerate(requests):
            engine.submit(prompt, each, taker(i))
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in ended)), 120)
        await engine.close()
        return found

    found = asyncio.run(main())
    for llm in engines:
        check_clean(llm)
    return found


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_cut_requests_are_as_if_they_were_not(engines: list[LLM], data: Any) -> None:
    texts = data.draw(st.lists(prompts, min_size=1, max_size=5))
    each = [replace(data.draw(params), **data.draw(special)) for _ in texts]
    cuts = data.draw(st.lists(st.integers(0, 9), max_size=8))
    found = serve(engines, list(zip(texts, each, strict=True)), cuts)
    for text, p, deltas in zip(texts, each, found, strict=True):
        whole = engines[0].generate([text], [p])[0].outputs[0]
        assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
        assert "".join(delta.text for delta in deltas) == whole.text
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
        logprobs = [entry.token_id for delta in deltas for entry in delta.logprobs]
        assert logprobs == ([] if whole.logprobs is None else whole.token_ids)


@pytest.mark.parametrize("policy", routing_names())
def test_every_policy_routes(engines: list[LLM], policy: str) -> None:
    before = [llm.engine.stats().generation_tokens for llm in engines]
    requests = [([i, 2, 3], replace(GREEDY, max_tokens=20)) for i in range(12)]
    found = serve(engines, requests, [], policy)
    for (prompt, _), deltas in zip(requests, found, strict=True):
        assert [token for delta in deltas for token in delta.token_ids] == tiny.greedy(prompt, 20)
    grown = [llm.engine.stats().generation_tokens - b for llm, b in zip(engines, before, strict=True)]
    assert sum(grown) == 240
    if policy not in ("predicted", "prefix_aware"):  # those may find that one is faster
        assert min(grown) > 0


def test_requests_are_traced_by_the_ingress(engines: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """One span each, although its replica is lost."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda url: exporter)

    async def main() -> None:
        fleet = LocalFleet({f"r{i}": Replica(llm.engine) for i, llm in enumerate(engines)}, [3])
        routing, options = make_routing("predicted", Random(0)), RoutingSettings(health=NEVER_SLOW)
        engine = RemoteEngine(fleet, fleet.replicas["r0"].facts(), engines[0].tokenizer, routing, options)
        await engine.replicas.poll()
        engine.start()
        app = create_app(cast("Engine", engine), ServerOptions(ui=False, traces_endpoint="http://localhost:4318"))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here", timeout=PATIENCE)
        async with app.router.lifespan_context(app), client:
            body = {"prompt": "owl", "max_tokens": 12, "ignore_eos": True}
            (await client.post("/v1/completions", json=body)).raise_for_status()
        await engine.close()

    asyncio.run(main())
    (span,) = exporter.get_finished_spans()
    found = span.attributes or {}
    assert found["gen_ai.usage.completion_tokens"] == 12 and found["gen_ai.response.finish_reasons"] == ("length",)
    times = [cast("float", found[f"gen_ai.latency.{name}"]) for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert 0 <= times[0] <= times[1] <= times[2]


def test_a_replica_tells_of_its_load(engines: list[LLM]) -> None:
    async def main() -> None:
        replica = Replica(engines[0].engine)
        stream = replica.generate(Submission("x", (1, 2), replace(GREEDY, max_tokens=100), 0, Slo(tpot=9.0), False, ""))
        async with aclosing(stream):
            for _ in range(3):
                await anext(stream)
            load, stats = await replica.load(), await replica.scaling_stats()
            assert (load.report.requests, load.report.slots, load.health) == (1, 4, "ok")
            assert load.stats.running == 1
            assert stats == {"waiting_tokens": 0.0, "occupancy": 0.25, "slo_finished": 0.0, "slo_attained": 0.0}
        await asyncio.to_thread(eventually, lambda: engines[0].engine.stats().running == 0)
        short = Submission("y", (1, 2), replace(GREEDY, max_tokens=4), 0, Slo(tpot=9.0), False, "")
        first, *_ = [message async for message in replica.generate(short)]
        assert first == Admitted()
        stats = await replica.scaling_stats()
        assert (stats["slo_finished"], stats["slo_attained"]) == (1.0, 1.0)

    asyncio.run(main())
    check_clean(engines[0])


def test_a_stopping_replica_hands_its_requests_over() -> None:
    """Its last delta is not sent: it may hold text that was flushed, and another replica goes on before it."""

    async def main() -> None:
        with tiny.llm(draft=[], **SIZES) as llm:
            replica, messages = Replica(llm.engine), list[Message]()
            submission = Submission("x", (1, 2), replace(GREEDY, max_tokens=100), 0, Slo(), False, "")
            async for message in replica.generate(submission):
                messages.append(message)
                if len(messages) == 5:
                    await asyncio.to_thread(llm.close)
            assert getattr(messages[-1], "reason", None) == "lost"
            assert all(delta.finish_reason is None for m in messages for delta in getattr(m, "deltas", ()))
            with pytest.raises(EngineDead):
                replica.check_health()
            assert (await replica.load()).health == "dead"
            after = [m async for m in replica.generate(replace(submission, id="z"))]
            assert [getattr(m, "reason", None) for m in after] == ["lost"]

    asyncio.run(main())


def test_a_slow_reader_gets_everything(engines: list[LLM]) -> None:
    """The engine has ended the request long before its outputs are read."""

    async def main() -> None:
        replica, tokens, last = Replica(engines[0].engine), list[int](), None
        submission = Submission("slow", (1, 2), replace(GREEDY, max_tokens=40), 0, Slo(), False, "")
        async for message in replica.generate(submission):
            await asyncio.sleep(0.02)
            for delta in getattr(message, "deltas", ()):
                tokens += delta.token_ids
                last = delta
        assert tokens == tiny.greedy([1, 2], 40) and last is not None and last.finish_reason == "length"

    asyncio.run(main())
    check_clean(engines[0])
