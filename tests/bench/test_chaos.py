"""The fault harness: engines with failing parts give right answers, and it finds engines that do not."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from helpers import quick_xla
from helpers.patience import PATIENCE
from jaxspec.bench.__main__ import main
from jaxspec.bench.chaos.clients import Live, client
from jaxspec.bench.chaos.driver import Answer, Watched
from jaxspec.bench.chaos.live import damage
from jaxspec.bench.chaos.scenario import PLACEMENTS, Asked, Client, draw, draw_asked
from jaxspec.bench.chaos.server import Limit, Server
from jaxspec.bench.fuzz.checkpoint import write_folder
from jaxspec.bench.reliability import record
from jaxspec.engine.recovery import Recovery
from jaxspec.engine.request_state import RequestState
from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.paths import cache_folder
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched import Scheduler
from jaxspec.sched.kv.page_pool import PagePool


def serve(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """-> the exit status, and what happened."""
    file = tmp_path / "found.json"
    status = main(["chaos", "--json", str(file), *options])
    return status, json.loads(file.read_text())["faults"][0]


@pytest.mark.slow
def test_engines_with_failing_parts_give_right_answers(tmp_path: Path) -> None:
    status, found = serve(tmp_path, "--scenarios", "3", "--requests", "120", "--seed", "1", "--first", "3")
    assert (status, found["failures"]) == (0, [])
    assert found["restarts"] > 3 and found["faults"]["cancelled"] > 10
    assert sum(found["ended"].values()) == found["requests"] == 360
    assert found["ended"]["length"] > 200


@pytest.mark.slow
def test_a_scenario_is_the_same_each_time(tmp_path: Path) -> None:
    options = "--scenarios", "1", "--requests", "40", "--seed", "1", "--first", "3"
    once, again = (serve(tmp_path, *options)[1] for _ in range(2))
    differing = {name for name in once if once[name] != again[name]}
    assert differing <= {"seconds", "memory_mib"} and once["tokens"] > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "placed"), [("11", ("draft_devices", "micro_batches")), ("23", ("tensor_parallel_size",))]
)
def test_what_needs_two_devices_is_drawn_and_is_the_same_each_time(
    first: str, placed: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "jaxspec.bench", "chaos", "--seed", "7", "--first", first]
    command += ["--scenarios", "1", "--requests", "60", "--json"]
    environment = quick_xla.environment({"XLA_FLAGS": ""})
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    found: list[dict[str, Any]] = []
    for i in range(2):  # processes of their own: the number of devices is fixed when JAX starts
        done = subprocess.run([*command, f"{tmp_path}/{i}.json"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads((tmp_path / f"{i}.json").read_text())["faults"][0])
    assert found[0]["devices"] == 2 and set(found[0]["placed"]) == set(placed)
    assert found[0]["digest"] == found[1]["digest"]


def test_without_a_second_device_a_scenario_is_the_same_apart_from_it() -> None:
    drawn = [(draw(Random(i), Random(i)), draw(Random(i), Random(i), 2)) for i in range(200)]
    for one, two in drawn:
        assert not set(one.settings) & set(PLACEMENTS)
        assert (one.fails, one.leaves, one.predicts) == (two.fails, two.leaves, two.predicts)
        parallel = two.settings.get("tensor_parallel_size")
        changed = {name for name in one.settings if one.settings[name] != two.settings.get(name)}
        assert changed <= ({"max_num_batched_tokens", "max_num_seqs"} if parallel else {"acceptance"})
    assert all(sum(two.settings.get(name) is not None for _, two in drawn) > 20 for name in PLACEMENTS)


def lose_a_token(patch: pytest.MonkeyPatch) -> None:
    """A restart forgets each request's last token."""
    restart = Recovery._begin_with

    def forgetful(self: Recovery, states: Any) -> None:
        for state in states:
            if len(state.output) > 1:
                state.output.pop()
        restart(self, states)

    patch.setattr(Recovery, "_begin_with", forgetful)


def leak_a_page(patch: pytest.MonkeyPatch) -> None:
    """Cancelled requests keep a page."""
    cancel = Scheduler.cancel

    def leaking(self: Scheduler, request_id: str, now: float) -> bool:
        request = self._requests.get(request_id)
        if request is not None and request.pages:
            request.pages = request.pages[1:]
        return cancel(self, request_id, now)

    patch.setattr(Scheduler, "cancel", leaking)


def forget_to_end(patch: pytest.MonkeyPatch) -> None:
    """Some requests never get their last output."""
    delta = RequestState.delta

    def silent(self: RequestState) -> OutputDelta | None:
        found = delta(self)
        return None if found is not None and found.finish_reason == "abort" else found

    patch.setattr(RequestState, "delta", silent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "found"),
    [(lose_a_token, "wrong tokens|tokens for"), (leak_a_page, "references differ"), (forget_to_end, "no end")],
)
def test_broken_engines_are_found(
    broken: Any, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch)
    status, happened = serve(tmp_path, "--scenarios", "2", "--requests", "60", "--seed", "1", "--first", "3")
    assert status == 1 and any(part in failure for failure in happened["failures"] for part in found.split("|"))
    assert "--first" in capsys.readouterr().out  # how to serve it again


EXPECTED = Answer((5, 6, 7), "abc", "length")


def watched(client: Client, *deltas: tuple[tuple[int, ...], str, str | None]) -> Watched:
    one = Watched("r", Asked((1,), SamplingParams(seed=1, max_tokens=3)), EXPECTED, client)
    count = 0
    for tokens, text, reason in deltas:
        count += len(tokens)
        one.take(OutputDelta("r", text, tokens, finish_reason=reason, metrics=RequestMetrics(0.0, output_tokens=count)))
    return one


def test_answers_are_judged() -> None:
    stays, leaves = Client(), Client(cancels=1)
    assert watched(stays, ((5, 6), "ab", None), ((7,), "c", "length")).wrong(True) == []
    assert watched(leaves, ((5, 6), "ab", "abort")).wrong(True) == []
    assert "ended with abort" in watched(stays, ((5, 6), "ab", "abort")).wrong(True)[0]
    assert "wrong tokens" in watched(leaves, ((5, 9), "ab", "abort")).wrong(True)[0]
    assert "2 tokens for 3" in watched(stays, ((5, 6), "ab", "length")).wrong(True)[0]
    assert "'abx'" in watched(stays, ((5, 6, 7), "abx", "length")).wrong(True)[0]
    assert "after the last" in watched(stays, ((5, 6, 7), "abc", "length"), ((), "", None)).wrong(True)[0]
    assert watched(stays, ((9, 9, 9), "xyz", "length")).wrong(False) == []
    assert "an error" in watched(leaves, ((5,), "a", "error")).wrong(True)[0]
    assert watched(Client(poisonous=1), ((5,), "a", "error")).wrong(True) == []


def test_requests_depend_on_the_seed_alone() -> None:
    assert [draw_asked(Random(3), 200) for _ in range(3)] == [draw_asked(Random(3), 200) for _ in range(3)]
    assert all(max(draw_asked(Random(i), 200).prompt) < 200 for i in range(50))


class Proxied:
    """What clients ask, without a server. ends: requests under way may have failed."""

    url, failing, ends = "http://x", False, 0

    async def lost(self, ends: int) -> bool:
        return self.ends != ends


@pytest.mark.parametrize(
    ("status", "text", "stays", "found"),
    [
        (200, "abc", True, ""), (200, "abd", True, "'abd'"), (200, "", True, "without a finish reason|''"),
        (500, "", True, "500"), (503, "", True, "503"), (503, "", False, ""), (500, "", False, ""),
    ],
)  # fmt: skip
def test_clients_of_servers_judge_answers(status: int, text: str, stays: bool, found: str) -> None:
    live, stop, target = Live(), asyncio.Event(), Proxied()
    pairs = [(Asked((1,), SamplingParams(seed=1, max_tokens=3)), Answer((5, 6, 7), "abc", "length"))]

    def answer(request: httpx.Request) -> httpx.Response:
        if live.requests == 12:
            stop.set()
        target.ends += not stays
        choice = {"text": text, "finish_reason": "length" if text else None}
        if not json.loads(request.read())["stream"]:
            return httpx.Response(status, json={"choices": [choice]})
        return httpx.Response(status, text=f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            await client(live, http, [target], pairs, Random(3), stop)

    asyncio.run(run())
    assert live.requests == 12 and sum(live.ended.values()) == 12
    assert bool(live.failures) == bool(found)
    assert all(any(part in failure for part in found.split("|")) for failure in live.failures)


def test_cache_files_are_damaged(tmp_path: Path) -> None:
    assert damage(tmp_path, Random(0)) is None
    (tmp_path / "profiles").mkdir()
    file = tmp_path / "profiles" / "a.json"
    for i in range(20):
        file.write_bytes(b"0123456789")
        assert damage(tmp_path, Random(i)) == "damaged profiles" and file.read_bytes() != b"0123456789"


@pytest.mark.slow
def test_servers_on_a_full_disk_and_with_little_memory(tmp_path: Path) -> None:
    # Kernels of its own would be written, too.
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_folder("kernels"))
    server = Server(write_folder(tmp_path / "tiny"), tmp_path / "cache", tmp_path, 0)
    try:
        asyncio.run(_limited(server))
    finally:
        server.kill()
    assert not list((tmp_path / "cache" / "compiled").iterdir())  # no parts of files
    assert len(server.logs) == 1


async def _limited(server: Server) -> None:
    prompt = {"model": "tiny", "prompt": list(range(1, 7)) * 3, "max_tokens": 9, "temperature": 0}
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        server.start(Limit.files(0))
        await server.ready(http)
        answer = await http.post(f"{server.url}/v1/completions", json=prompt)
        assert answer.json()["usage"]["completion_tokens"] == 9
        assert not await server.lost(server.ends)
        assert await server.end(signal.SIGTERM) == 0
        assert "cannot be kept for later starts" in server.log and "cannot store the measured times" in server.log
        assert "suffix_path: cannot write" in server.log and "Traceback" not in server.log
        server.start(Limit.memory(200 << 20))
        with pytest.raises(RuntimeError, match="did not start"):
            await server.ready(http)
        assert server.status != 0
        assert await server.lost(server.ends)


def test_without_ray_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["chaos", "--live", "1", "--ray"]) == 2
    assert "ray is missing, which this command needs: run .venv/bin/pip" in capsys.readouterr().err


def test_a_pool_that_is_cleared_is_empty() -> None:
    pool = PagePool(4, 2)
    held = pool.allocate(3)
    pool.register([1, 2, 3, 4], held, range(2))
    pool.release(held[:1])
    pool.clear()
    pool.check([])
    assert pool.num_free == 4 and pool.cached([1, 2, 3, 4], 4) == 0


def test_runs_add_up_on_the_page(tmp_path: Path) -> None:
    one = {
        "seed": 1, "first": 0, "scenarios": 2, "requests": 40, "tokens": 300, "restarts": 3, "turns": 90,
        "faults": {"lose pool": 2}, "ended": {"length": 39, "abort": 1}, "failures": [], "seconds": 5.0,
    }  # fmt: skip
    live = {"requests": 7, "faults": {"SIGKILL": 1}, "ended": {"stop": 7}, "failures": ["hung"], "seconds": 60.0}
    (tmp_path / "reliability.json").write_text(json.dumps({"other": [1]}))
    record({"faults": [one]}, tmp_path)
    record({"faults": [one | {"seed": 2}], "live": [live], "replicas": [live | {"resumed": 3}]}, tmp_path)
    kept = json.loads((tmp_path / "reliability.json").read_text())
    assert kept["other"] == [1] and [run["seed"] for run in kept["faults"]] == [1, 2]
    page = (tmp_path / "reliability.md").read_text()
    assert "80 requests, 600 tokens and 6 restarts in 2 runs, no failure. Seeds and scenarios: 1: 0–1; 2: 0–1." in page
    assert "| lose pool | 4 |" in page and "| length | 78 |" in page
    assert page.count("7 requests in 1 runs of 1 minutes together, 1 failure.") == 2
    assert page.count("1 failure. 3 times a request went on at another replica with the output so far.") == 1
