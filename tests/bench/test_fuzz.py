"""The fuzzer: what it sends can be repeated, it sees what goes wrong, and it finds nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.fakes import FakeEngine
from jaxspec.bench.__main__ import main
from jaxspec.bench.fuzz import corpus, loading
from jaxspec.bench.fuzz.bodies import Body, body
from jaxspec.bench.fuzz.files import make
from jaxspec.bench.fuzz.hostile import Raw
from jaxspec.bench.fuzz.judge import flaw
from jaxspec.bench.fuzz.mutators import Pairs, dump
from jaxspec.bench.fuzz.server import Answer, InProcess, application
from jaxspec.models.load import load_model

BODY = Body(0, "/v1/completions", (), (b"{}",))
ERROR = {"message": "n: must be small", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}


def answer(status: int, content: Any = None, **error: Any) -> Answer:
    return Answer(
        status, {"content-type": "application/json"}, json.dumps(content or {"error": ERROR | error}).encode()
    )


def test_a_body_depends_on_seed_and_number_only() -> None:
    assert [body(3, i) for i in range(50)] == [body(3, i) for i in range(50)]
    assert len({body(3, i).data for i in range(50)}) > 40 and body(3, 1).data != body(4, 1).data


def test_what_json_values_cannot_say() -> None:
    assert dump({"a": Raw("1e309"), "b": Pairs([("c", 1), ("c", [None])])}) == '{"a":1e309,"b":{"c":1,"c":[null]}}'


@pytest.mark.parametrize(
    "given",
    [
        answer(400),
        answer(200, {"id": "x"}),
        answer(429, code="queue_full"),
        answer(400, param=None, code="invalid_json"),
    ],
)
def test_right_answers(given: Answer) -> None:
    assert flaw(BODY, given) is None


@pytest.mark.parametrize(
    "given",
    [answer(500), answer(503, code="draining"), answer(429), answer(400, {"detail": "x"}), answer(400, message=""),
    answer(418),
     answer(400, param=None), answer(400, message="x" * 5000), answer(200, {"error": {"message": "x"}}), Answer(),
     Answer(200, {"content-type": "application/json"}, b"<html>"), Answer(400, {}, b"no"),
     Answer(200, {"content-type": "text/event-stream"}, b'data: {"error": {"message": "x"}}\n\n')],
)  # fmt: skip
def test_wrong_answers(given: Answer) -> None:
    assert flaw(BODY, given) is not None


def test_a_bug_of_the_application_is_seen() -> None:
    class Broken(FakeEngine):
        def submit(self, *arguments: Any, **keywords: Any) -> Any:
            raise ZeroDivisionError

    async def send() -> Answer:
        async with InProcess.running(application(Broken())) as server:  # pyright: ignore[reportArgumentType]
            headers = ((b"content-type", b"application/json"),)
            return await server.send(replace(BODY, headers=headers, chunks=(b'{"prompt": ', b'"x"}')))

    assert flaw(BODY, asyncio.run(send())) == "500: internal server error"


def test_a_loader_that_fails_oddly_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.json"

    def refuse(path: Path) -> None:
        raise ValueError("no")

    def break_(path: Path) -> None:
        raise KeyError("x")

    known: Any = {"named": lambda path: int(f"{path}"), "unnamed": refuse, "odd": break_, "fine": lambda path: None}
    assert [loading.flaw(kind, path, known) is None for kind in known] == [True, False, False, True]


def test_valid_files_load_and_mutated_ones_are_refused_by_name(tmp_path: Path) -> None:
    corpus.write(tmp_path / "corpus")
    known = loading.loaders(load_model(str(tmp_path / "corpus" / "hf")))
    files = {
        "model": ("hf", "sharded", "model.gguf"),
        "lengths_index": ("lengths.safetensors",),
        "lengths": ("lengths.csv", "lengths.jsonl"),
    }
    for kind in known:
        own = files.get(kind) or [path.name for path in (tmp_path / "corpus").glob(f"{kind}.*")]
        assert own
        for name in own:
            known[kind](tmp_path / "corpus" / name)
    for index in range(60):
        into = tmp_path / str(index)
        into.mkdir()
        kind, path, change = make(11, index, tmp_path / "corpus", into)
        assert loading.flaw(kind, path, known) is None, change


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "fuzz",
        "--bodies",
        "120",
        "--probe-every",
        "60",
        "--seed",
        "12",
        "--files",
        "10",
        "--json",
        str(tmp_path / "x.json"),
    ]
    assert main(given) == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "x.json").read_text())
    (bodies,), (files,) = found["bodies"], found["files"]
    assert sum(bodies["statuses"].values()) == 120 and bodies["probes"] == 3 and not bodies["failures"]
    assert sum(files["kinds"].values()) == 10 and not files["failures"]


@pytest.mark.slow
def test_over_a_socket(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--bodies", "100", "--socket", "--seed", "13"]) == 0, capsys.readouterr().out
