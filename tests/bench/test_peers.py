"""The comparison with peers: servers that take turns, disturbed turns, the summary. The servers are small fakes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from helpers.fakes import ByteTokenizer, as_tokenizer
from jaxspec.bench import BenchError, peers
from jaxspec.bench.__main__ import main
from jaxspec.bench.disturbance import Disturbance, Watch, cpu_seconds, resident_bytes
from jaxspec.bench.peers import engines, scenarios, weights
from jaxspec.bench.peers.engines import Engine
from jaxspec.bench.peers.scenarios import Prompts, Turn
from jaxspec.bench.peers.server import Server
from jaxspec.bench.peers.summary import agreement, leading_agreement, rows
from jaxspec.bench.peers.turns import Disturbed, Measured, Rules, alternate

#: Streams the words of its first argument, as many as are asked for; its second argument limits them.
FAKE = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
text, most = sys.argv[1], int(sys.argv[2])
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        n = min(body["max_tokens"], most)
        self.send_response(200); self.end_headers()
        def send(choices, **more):
            self.wfile.write(f"data: {json.dumps({'choices': choices, **more})}\\n\\n".encode()); self.wfile.flush()
        for i in range(n):
            send([{"text": text, "finish_reason": "length" if i == n - 1 else None}])
        send([], usage={"prompt_tokens": len(body["prompt"]), "completion_tokens": n})
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
"""


def engine(name: str, text: str = "a", most: int = 999, **more: Any) -> Engine:
    return Engine(name, [sys.executable, "-c", FAKE, text, str(most), "{port}"], "1", **more)


@contextmanager
def started(*which: Engine) -> Iterator[dict[Engine, Server]]:
    with ExitStack() as stack:
        servers, _ = peers.start(stack, which, 1, {})
        yield servers


@pytest.fixture
def prompts() -> Prompts:
    return Prompts(as_tokenizer(ByteTokenizer()))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[Disturbance]:
    """Disturbances to report, the last one for good."""
    found = [Disturbance(0.0, 0.0)]
    monkeypatch.setattr(Watch, "read", lambda self: found.pop(0) if len(found) > 1 else found[0])
    return found


@pytest.mark.slow
def test_servers_take_turns_and_idle_ones_are_stopped(prompts: Prompts, quiet: list[Disturbance]) -> None:
    a, b, greedy = engine("a"), engine("b"), engine("greedy", samples=False)
    known = scenarios.scenarios(2, 4, [32])
    assert list(known) == ["decode-1", "decode-2", "sample-1", "sample-2", "prefill-32", "loaded"]
    with started(a, b, greedy) as servers:
        assert {psutil.Process(server.pid).status() for server in servers.values()} == {psutil.STATUS_STOPPED}
        advanced: list[int] = []
        for name, scenario in known.items():
            found = alternate(name, scenario, servers, prompts, Rules(2, 1), 0, lambda: advanced.append(1))
            names = {"a", "b"} if name.startswith("sample") else {"a", "b", "greedy"}
            assert found.turns.keys() == names and found.failed.keys() == {"a", "b", "greedy"} - names
            assert all(len(its) == 2 for its in found.turns.values())
            measures = [turn.measures.keys() for its in found.turns.values() for turn in its]
            assert all(keys == set(scenario.measures) for keys in measures)
            json.dumps(found.to_json(), allow_nan=False)
        assert len(advanced) == 3 * (2 * 2 + 4 * 3)
        assert {psutil.Process(server.pid).status() for server in servers.values()} == {psutil.STATUS_STOPPED}
        assert all(server.resident_bytes() > 2**20 for server in servers.values())
        pids = [server.pid for server in servers.values()]
    assert not any(map(psutil.pid_exists, pids))


def test_a_request_that_stops_early_leaves_the_server_out(prompts: Prompts, quiet: list[Disturbance]) -> None:
    scenario = scenarios.decode(2, 4, 0.0)
    with started(engine("a"), engine("short", most=3)) as servers:
        found = alternate("decode-2", scenario, servers, prompts, Rules(1, 1), 0, lambda: None)
    assert found.failed == {"short": "a request for 4 tokens got 3"} and list(found.turns) == ["a"]


def test_disturbed_turns_are_repeated_and_then_refused(prompts: Prompts, quiet: list[Disturbance]) -> None:
    scenario, bad = scenarios.decode(1, 2, 0.0), Disturbance(0.0, 0.2)
    once = Rules(1, 1, pause_s=0.0)
    with started(engine("a")) as servers:
        quiet[:] = [Disturbance(1.0, 0.0), bad, Disturbance(0.04, 0.0)]  # warm-up, disturbed, repeated
        found = alternate("x", scenario, servers, prompts, once, 0, lambda: None)
        assert found.disturbances == {"a": [Disturbance(0.04, 0.0)]}
        quiet[:] = [bad]
        with pytest.raises(Disturbed, match="a was disturbed 2 times in a row, at last by 0% steal and 20% load"):
            alternate("x", scenario, servers, prompts, once, 0, lambda: None)
        allowed = Rules(1, 1, allow=True, pause_s=0.0)
        assert alternate("x", scenario, servers, prompts, allowed, 0, lambda: None).disturbances == {"a": [bad]}


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(BenchError, match="ended with exit code 1: RuntimeError: no memory"):
        Server("a", [sys.executable, "-c", "raise RuntimeError('no memory')"], {}, 1)
    with pytest.raises(BenchError, match="cannot start"):
        Server("a", ["/nonexistent/server"], {}, 1)


def test_the_watch_counts_own_processes_as_no_disturbance(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    then = watch._begin
    now = then[0] + 2.0, then[1] + 1.0, then[2] + 0.5, then[3] + 0.75
    monkeypatch.setattr(watch, "_read", lambda: now)
    cores = psutil.cpu_count() or 1
    read = watch.read()
    # Differences of seconds since the machine started are rounded.
    assert (read.steal, read.foreign) == (pytest.approx(0.25 / cores), pytest.approx(0.125 / cores))
    assert read.worst == read.steal
    me = psutil.Process().pid
    assert cpu_seconds(me) > 0 and resident_bytes(me) > 2**20
    assert cpu_seconds(2**22 + 1) == 0 == resident_bytes(2**22 + 1)


def test_medians_and_ratios_by_round() -> None:
    def measured(*values: float) -> list[Turn]:
        return [Turn({"speed": value}) for value in values]

    found = Measured({"base": measured(10, 20, 30), "b": measured(20, 30, 15)})
    base, b = rows("s", ("speed",), found, "base")
    assert base.ratio is not None and (base.median.value, base.ratio.value) == (20, 1)
    assert b.ratio is not None and (b.ratio.value, b.ratio.lowest, b.ratio.highest) == (1, 0.5, 2)
    assert (b.median.lowest, b.median.highest) == (15, 30)
    assert rows("s", ("speed",), found, "absent")[0].ratio is None


def test_agreement_of_answers() -> None:
    tokenizer = as_tokenizer(ByteTokenizer())
    answers = {"jaxspec": [Turn({}, ["abc", "abc"])], "b": [Turn({}, ["abd", "abc"])]}
    assert agreement(answers, tokenizer) == {"jaxspec": 3, "b": 2.5}
    assert agreement({"b": [Turn({}, ["abc"])]}, tokenizer) == {} == agreement({"jaxspec": [Turn({})]}, tokenizer)
    assert [leading_agreement([1, 2, 3], b) for b in ([1, 2, 3], [1, 9, 3], [1, 2], [])] == [3, 1, 2, 0]


def test_long_prompts_have_the_number_of_tokens(prompts: Prompts) -> None:
    assert len(prompts.long(np.random.default_rng(0), 100)) == 100


def test_converted_weights_are_kept_and_unfinished_ones_are_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"x")
    program = tmp_path / "quantize"
    program.write_text('#!/bin/sh\necho started >> "$2.log"\necho F32 > "$3"\nexit $(cat "$2.code")\n')
    program.chmod(0o755)
    code, log = tmp_path / "m.gguf.code", tmp_path / "m.gguf.log"
    code.write_text("1")
    with pytest.raises(BenchError, match="quantize failed"):
        weights.float32_gguf(gguf, program)
    assert not list((tmp_path / "cache" / "peers").iterdir())
    code.write_text("0")
    assert weights.float32_gguf(gguf, program) == weights.float32_gguf(gguf, program)
    assert log.read_text().count("started") == 2


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, quiet: list[Disturbance]) -> None:
    """With fake engines: one that works, one that does not start, and a peer that is not installed."""
    gguf, out = tmp_path / "m.gguf", tmp_path / "out.json"
    gguf.touch()

    class File:
        def __init__(self, _: Path) -> None: ...

        def tokenizer(self) -> Any:
            return as_tokenizer(ByteTokenizer())

    monkeypatch.setattr("jaxspec.models.load.gguf.GGUFFile", File)
    broken = Engine("broken", [sys.executable, "-c", "raise RuntimeError('no memory')"], "1")
    monkeypatch.setattr(engines, "jaxspec", lambda setup: [engine("jaxspec"), engine("other", "b"), broken])
    where = ["peers", "--model", str(gguf), "--peers-folder", str(tmp_path), "--threads", "1", "--max-tokens", "3"]
    short = [*where, "--repeats", "2", "--retries", "1", "--json", str(out)]
    assert main([*short, "--peers", "llama.cpp", "--scenarios", "decode-1", "prefill-1024"]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    assert "broken" in shown and "0 of 8 turns disturbed" in shown
    assert found["left_out"] == {
        "llama.cpp": f"not installed in {tmp_path}/llama.cpp",
        "broken": "ended with exit code 1: RuntimeError: no memory",
    }
    decode = found["scenarios"]["decode-1"]
    assert decode["agreeing_tokens"] == {"jaxspec": 3, "other": 0} and len(decode["turns"]["other"]) == 2

    assert main([*short, "--scenarios", "decode-9"]) == 2 and "unknown scenario decode-9" in capsys.readouterr().err
    assert main([*short, "--peers", "--baseline", "broken"]) == 2 and "no server broken" in capsys.readouterr().err
    monkeypatch.setattr(Rules, "__init__", _without_pause(Rules.__init__))
    quiet[:] = [Disturbance(0.5, 0.0)]
    assert main([*short, "--peers", "--scenarios", "decode-1"]) == 1 and "nothing reported" in capsys.readouterr().err


def _without_pause(init):
    return lambda self, *rest, **named: init(self, *rest, **{**named, "pause_s": 0.0})
