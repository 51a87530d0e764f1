"""The target's answers as training text: the file of lines, and the command that writes it and takes it up again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import tiny
from helpers.jsonl import Lasting, write_lines
from jaxspec.draft.distill import generate
from jaxspec.draft.distill.data import read_rows
from jaxspec.draft.distill.lines import mend, read_lines
from jaxspec.draft.distill.origin import OtherModel, check, origin
from jaxspec.models.load import LoadedModel


def test_a_line_that_was_cut_off_is_left_out_and_can_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = '{"a": 1}\n\n{"a": "Bücher"}\n'.encode()
    path.write_bytes(whole + '{"a": "Bü'.encode()[:-1])
    assert list(read_lines(path)) == [{"a": 1}, {"a": "Bücher"}]
    mend(path)
    assert path.read_bytes() == whole
    path.write_bytes(whole + b'{"a": 3}')
    assert len(list(read_lines(path))) == 3, "only the line's end is missing, as editors leave it"
    path.write_bytes(whole + b'{"a"\n')
    with pytest.raises(ValueError, match="line 4"):
        list(read_lines(path))


@pytest.fixture(scope="module")
def engine() -> Iterator[Lasting]:
    llm = Lasting(
        tiny.model(), page_size=16, kv_cache_tokens=1024, max_num_seqs=6, max_model_len=80, max_num_batched_tokens=16,
        token_buckets=[16], compilation_cache_dir="", enable_prefix_caching=False, compile_in_background=False,
    )  # fmt: skip
    yield llm
    llm.close()


def test_answers_are_written_and_taken_up_again(
    engine: Lasting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(generate, "load_model", lambda name: opened.append(name) or tiny.model())
    monkeypatch.setattr(generate, "LLM", lambda model, **_: engine)
    monkeypatch.setattr(generate, "BATCH", 3)
    texts = ["one", "two", "a prompt that is too long: " + 40 * "x", "three", "four"]
    prompts = write_lines(tmp_path / "p.jsonl", [{"id": t[:5], "turns": [t, "more"]} for t in texts[:3]])
    others = tmp_path / "q.jsonl"  # no ids, and no line end after the last
    others.write_text("\n".join(json.dumps({"turns": [t]}) for t in texts[3:]))
    whole, cut = tmp_path / "new" / "whole.jsonl", tmp_path / "cut.jsonl"

    def run(out: Path, *more: str) -> int:
        options = ["--max-tokens", "6", "--max-prompt-tokens", "40", "--model", "tiny", *more]
        return generate.main(["--prompts", str(prompts), str(others), "--out", str(out), *options])

    assert run(whole) == 0
    rows = list(read_lines(whole))
    assert {(r["id"], r["temperature"]) for r in rows} == {
        (id, t) for id in ("one", "two", "q-0", "q-1") for t in (0.0, 0.8)
    }
    for row in rows:
        assert row.keys() == {
            "id", "temperature", "prompt_ids", "output_ids", "finished", "model", "model_digest"
        }  # fmt: skip
        assert (row["model"], row["model_digest"]) == origin(tiny.model())
        assert 0 < len(row["output_ids"]) <= 6
        assert row["finished"] == (row["output_ids"][-1] in tiny.model().config.eos_token_ids)
    one = next(r for r in rows if r["id"] == "one" and r["temperature"] == 0)
    assert bytes(one["prompt_ids"]) == b"[user]one\n[assistant]"
    assert one["output_ids"] == tiny.greedy(one["prompt_ids"], 6)[: len(one["output_ids"])]

    kept = whole.read_bytes()
    cut.write_bytes(kept[: sum(map(len, kept.splitlines(True)[:3])) + 30])
    assert run(cut) == 0
    assert cut.read_bytes() == kept, "as if it had not been interrupted"
    assert len(read_rows([str(cut)], 64, origin(tiny.model()))) == 8
    assert opened == ["tiny", "tiny"]
    del texts[2]
    write_lines(prompts, [{"id": t, "turns": [t]} for t in texts[:2]])
    capsys.readouterr()
    assert run(cut, "--limit", "8") == 0
    assert "already answered" in capsys.readouterr().out and len(opened) == 2


def other(name: str) -> LoadedModel:
    """A model of the same sizes and other weights."""
    model = tiny.model()
    return replace(model, name=name, weights={**model.weights, "norm": model.weights["norm"] + 1})


def test_a_file_of_another_model_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "load_model", lambda name: tiny.model())
    prompts = write_lines(tmp_path / "p.jsonl", [{"id": str(i), "turns": ["x"]} for i in range(2)])
    row = {"id": "0", "temperature": 0.0, "prompt_ids": [1], "output_ids": [2], **origin(other("rand")).fields}
    before = write_lines(out := tmp_path / "out.jsonl", [row]).read_bytes()
    assert generate.main(["--prompts", str(prompts), "--out", str(out)]) == 2
    line = capsys.readouterr().err
    assert f"--model: {out} holds answers of rand, not of tiny; set another --out\n" in line
    assert out.read_bytes() == before


def test_the_digest_says_whose_answers_these_are(caplog: pytest.LogCaptureFixture) -> None:
    own = origin(tiny.model())
    check([own.fields, {"model": "tiny"}, {**own.fields, "model": "as/a/folder"}], own, "f")
    assert not caplog.records
    for row, said in (
        ({"model": "rand"}, "answers of rand, not of tiny"),
        (origin(other("rand")).fields, "answers of rand, not of tiny"),
        (origin(other("tiny")).fields, "another model that is also called tiny"),
    ):
        with pytest.raises(OtherModel, match=f"f holds .*{said}"):
            check([own.fields, row], own, "f")
    check([{"id": 1}, {"id": 2}], own, "f")
    assert [r.getMessage() for r in caplog.records] == [
        "f: 2 answers name no model, because an earlier version wrote them; assuming tiny"
    ]


@pytest.mark.parametrize("content", [None, '{"id": 1}\n', '{"turns": []}\n', "{\n"])
def test_prompts_of_no_use_get_one_line(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    assert generate.main(["--prompts", str(path), "--out", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert str(path) in line and line.count("\n") == 1
