"""Collecting answers: every turn is asked, cut answers are marked, and an interrupted run is taken up again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from helpers.jsonl import Lasting, write_lines
from jaxspec.draft.distill import data as distill
from jaxspec.llm import LLM
from jaxspec.train_predictor import collect
from jaxspec.train_predictor.answers import Origin, origin_of, read_lines
from jaxspec.train_predictor.conversations import conversations
from jaxspec.train_predictor.data import group_of, read_rows

CAP = 6
END = tiny.model().config.eos_token_ids[0]


@pytest.fixture(scope="module")
def engine() -> Iterator[Lasting]:
    llm = Lasting(
        tiny.model(), page_size=16, kv_cache_tokens=2048, max_num_seqs=4, max_model_len=112, max_num_batched_tokens=16,
        token_buckets=[16], compilation_cache_dir="", compile_in_background=False, max_queued_requests=2,
    )  # fmt: skip
    yield llm
    LLM.close(llm)


@pytest.fixture
def run(engine: Lasting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(collect, "load_model", lambda name: tiny.model())
    monkeypatch.setattr(collect, "LLM", lambda model, **_: engine)
    prompts = write_lines(
        tmp_path / "p.jsonl",
        [{"id": "one", "turns": ["hi"], "dataset": "greetings"},
         {"id": "two", "turns": ["a", "b", "c"], "replies": ["x"]},
         {"id": "long", "turns": [120 * "z", "y"]},
         {"id": "four", "turns": ["hi"]}],
    )  # fmt: skip

    def call(out: Path, *more: str) -> int:
        return collect.main(["--prompts", str(prompts), "--out", str(out), "--max-tokens", str(CAP), *more])

    return call


def test_the_queue_holds_more_than_the_slots(
    run: Any, engine: Lasting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(collect, "LLM", lambda model, **settings: given.update(settings) or engine)
    assert run(tmp_path / "rows.jsonl", "--set", "max_num_seqs=300") == 0
    assert given["max_queued_requests"] == 600
    assert run(tmp_path / "others.jsonl", "--set", "max_queued_requests=7") == 0
    assert given["max_queued_requests"] == 7


def by_turn(path: Path) -> dict[tuple[str, float, int], dict[str, Any]]:
    return {(r["id"], r["temperature"], r["turn"]): r for r in read_lines(path)}


def test_each_turn_is_a_row_and_cut_answers_are_marked(run: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "new" / "rows.jsonl"
    assert run(out, "--temperature", "0", "0.9") == 0
    assert "1 conversations" not in capsys.readouterr().out, "at two temperatures it is two"
    rows = by_turn(out)
    assert {key[0::2] for key in rows} == {("one", 0), ("two", 0), ("two", 1), ("four", 0)} and len(rows) == 8
    for (_, temperature, turn), row in rows.items():
        assert row.keys() == {
            "id", "turn", "temperature", "prompt", "prompt_ids", "output_ids", "length", "capped", "group", "source",
            "model", "model_digest",
        }  # fmt: skip
        assert 1 <= row["length"] == len(row["output_ids"]) <= CAP
        assert bytes(row["prompt_ids"]).decode() == row["prompt"]
        assert (row["model"], row["model_digest"]) == origin_of(tiny.model())
        if temperature == 0:
            written = tiny.greedy(list(row["prompt"].encode()), CAP)
            ended = END in written
            assert row["output_ids"] == written[: written.index(END) + 1 if ended else CAP]
            assert row["capped"] == (not ended)
        assert turn or row["group"] == group_of(row["prompt"])
    second = rows["two", 0.0, 1]
    assert second["prompt"] == "[user]a\n[assistant]x\n[user]b\n[assistant]"
    assert second["group"] == rows["two", 0.0, 0]["group"]
    assert rows["one", 0.0, 0]["group"] == rows["four", 0.0, 0]["group"], "one prompt in two places"
    assert (rows["one", 0.0, 0]["source"], second["source"]) == ("greetings", "p")
    read = read_rows([str(out)], lambda: pytest.fail("no token ids"))
    assert [(r.length, r.capped) for r in read] == [(r["length"], r["capped"]) for r in read_lines(out)]
    texts = distill.read_rows([str(out)], 96, origin_of(tiny.model()))
    assert sorted(r.answer for r in texts) == sorted(r["output_ids"] for r in rows.values() if r["length"] > 1)


def test_a_cut_off_run_writes_what_it_would_have_written(
    run: Any, engine: Lasting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    options = ("--history", "own", "--temperature", "0.9")
    assert run(whole, *options) == 0
    rows = by_turn(whole)
    assert {key[0::2] for key in rows} == {("one", 0), ("two", 0), ("two", 1), ("two", 2), ("four", 0)}
    first, second = rows["two", 0.9, 0], rows["two", 0.9, 1]
    assert second["prompt"] == f"[user]a\n[assistant]{first['reply']}\n[user]b\n[assistant]"
    assert first["reply"] in rows["two", 0.9, 2]["prompt"] and "reply" not in rows["two", 0.9, 2]
    assert "1 conversations were left out" in capsys.readouterr().out

    lines = whole.read_bytes().splitlines(True)
    for kept in range(len(lines)):
        cut.write_bytes(b"".join(lines[:kept]) + lines[kept][:9])
        assert run(cut, *options) == 0
        assert by_turn(cut) == rows
    capsys.readouterr()
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(line for line in prompts.read_text().splitlines(True) if "long" not in line))
    monkeypatch.setattr(collect, "LLM", lambda *_, **__: pytest.fail("nothing is left to ask"))
    assert run(cut, "--history", "own", "--temperature", "0.9", "--limit", "2") == 0
    assert "already answered" in capsys.readouterr().out


def test_prompts_without_ids_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["a"]}\n{"turns": ["b", "c"]}')  # no line end after the last
    found = conversations([str(path)], [0.0, 0.8], own=False, seed=0)
    assert {(c.id, c.temperature, *c.turns) for c in found} == {
        ("q-0", 0.0, "a"), ("q-0", 0.8, "a"), ("q-1", 0.0, "b"), ("q-1", 0.8, "b")
    }  # fmt: skip


def test_a_history_cannot_change_half_way(run: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.jsonl"
    assert run(out) == 0
    assert run(out, "--history", "own") == 2
    assert "two was collected with --history file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [None, "", "{\n", '{"id": 1}\n', '{"turns": []}\n', '{"turns": ["a"], "replies": [1]}\n',
     '{"id": 1, "turns": ["a"]}\n{"id": 1, "turns": ["b"]}\n'],
)  # fmt: skip
def test_prompts_of_no_use_get_one_line(content: str | None, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    assert collect.main(["--prompts", str(path), "--out", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert line.startswith("jaxspec.train_predictor.collect: ") and line.count("\n") == 1


def test_a_cap_that_leaves_no_room_is_refused(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refused(cap: int, *more: str, room: int) -> None:
        assert run(tmp_path / "out.jsonl", "--max-tokens", str(cap), *more) == 2
        said = f"jaxspec.train_predictor.collect: --max-tokens {cap} leaves no room for a prompt in {room} tokens\n"
        assert capsys.readouterr().err.endswith(said)

    refused(112, room=112)  # the engine's own limit
    monkeypatch.setattr(collect, "LLM", lambda *_, **__: pytest.fail("loads the weights"))
    longest = tiny.model().config.max_position
    refused(longest, room=longest)
    monkeypatch.setattr(collect, "load_model", lambda _: pytest.fail("opens the model"))
    refused(64, "--set", "max_model_len=64", room=64)


@pytest.mark.parametrize("part", ["load_model", "LLM"])
def test_an_interrupt_while_loading_ends_in_one_message(
    run: Any, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(collect, part, interrupted)
    assert run(out := tmp_path / "out.jsonl") == 130
    said, resume = capsys.readouterr().err.splitlines()
    assert f"interrupted; {out} keeps the finished answers" in said and resume.startswith("python -m")


def test_an_output_of_something_else_is_refused(run: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.jsonl"
    earlier = {"id": "one", "turn": 0, "temperature": 0.0, "prompt": "a", "length": 3, "capped": False, "model": "tiny"}
    for row in ({"prompt": "a"}, earlier):  # `earlier` was written without token ids
        before = write_lines(out, [row]).read_bytes()
        assert run(out) == 2
        assert "was not written by this command" in capsys.readouterr().err
        assert out.read_bytes() == before


def test_rows_of_another_model_or_cap_are_not_mixed(run: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    one, out = Origin("one", "12ab"), tmp_path / "out.jsonl"
    row = {"id": "a", **one.fields, "capped": True, "length": 64}
    done = {collect.Key("a", 0.0, 0): row}
    collect.fitting(done, one, 64, out)
    for other, said in ((Origin("two", "34cd"), "one, not of two"), (Origin("one", "34cd"), "another model that is")):
        with pytest.raises(ValueError, match=f"--model: .*out.jsonl holds answers of {said}.*; set another --out"):
            collect.fitting(done, other, 64, out)
    with pytest.raises(ValueError, match="--max-tokens: a was cut at 64"):
        collect.fitting(done, one, 128, out)

    assert run(out) == 0
    before = out.read_bytes()
    model = tiny.model()
    other = replace(model, name="rand", weights={**model.weights, "norm": model.weights["norm"] + 1})
    monkeypatch.setattr(collect, "load_model", lambda name: other)
    assert run(out) == 2, "although nothing is left to ask"
    assert f"--model: {out} holds answers of tiny, not of rand; set another --out\n" in capsys.readouterr().err
    assert run(out, "--set", "model=tiny") == 2
    assert "--set model: set the model with --model" in capsys.readouterr().err
    assert out.read_bytes() == before
