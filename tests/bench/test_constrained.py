"""`jaxspec.bench constrained`: constraints and engines take turns, and answers have the lengths that are compared."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from helpers import tiny
from jaxspec import LLM
from jaxspec.bench import constrained
from jaxspec.bench.__main__ import main
from jaxspec.bench.constrained import CONSTRAINTS, FREE, Acceptance, Contender, Speed, judge
from jaxspec.bench.extraction import EXTRACTIONS
from jaxspec.outputs import SpeculationCounts

COMMON = (
    "compilation_cache_dir: ''\nkv_cache_tokens: 1920\nmax_model_len: 320\nmax_num_batched_tokens: 64\npage_size: 16\n"
    "max_num_seqs: 4\ntoken_buckets: [64]\n"
)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LLM]:
    """The tiny model stands for any; gives the list of what was loaded."""
    loaded: list[LLM] = []

    def load(**settings: Any) -> LLM:
        loaded.append(tiny.llm(**settings | {"show_progress": False}))
        return loaded[-1]

    monkeypatch.setattr("jaxspec.llm.LLM", load)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    Path("plain.yaml").write_text(COMMON + "draft: []\n")
    Path("trees.yaml").write_text(COMMON + "draft: [ngram]\ntree: fixed\n")
    return loaded


def test_constraints_and_engines_take_turns(engines, capsys, monkeypatch):
    asked: list[tuple[int, str, int]] = []
    generate = LLM.generate

    def recorded(llm: LLM, prompts: Any, params: Any) -> Any:
        (kind,) = {p.structured_outputs.kind if p.structured_outputs else "none" for p in params}
        outputs = generate(llm, prompts, params)
        asked.append((engines.index(llm), kind, len({len(o.outputs[0].token_ids) for o in outputs})))
        return outputs

    monkeypatch.setattr(LLM, "generate", recorded)
    options = ["--concurrency", "3", "--max-tokens", "30", "--repeats", "2", "--json", "out/found.json"]
    assert main(["constrained", "--config", "plain.yaml", "--tree-config", "trees.yaml", *options]) == 0

    turns = [(engine, kind) for engine in (0, 1) for kind in ("none", "regex", "json")]
    assert [turn[:2] for turn in asked] == turns * 6
    assert all(lengths == 1 for *_, lengths in asked[:18])  # the batches of the speed part end together
    assert all(llm.engine.health == "dead" and not llm.engine.token_observers for llm in engines)

    report, said = json.loads(Path("out/found.json").read_text()), capsys.readouterr().out
    assert report["command"] in said and report["machine"]["processor"] in said
    assert shlex.split(report["command"])[4:] == [
        "--config", "plain.yaml", "--tree-config", "trees.yaml", "--repeats", "2", "--concurrency", "3", "--max-tokens",
        "30", "--json", "out/found.json",
    ]  # fmt: skip
    rows = report["results"]
    assert [(r["preset"], r["constraint"]) for r in rows] == [(p, c) for p in ("plain", "trees") for c in CONSTRAINTS]
    for row in rows:
        assert len(row["step_ms"]) == len(row["tpot_ms"]) == len(row["host_ms"]) == 2 and min(row["step_ms"]) > 0
        assert min(row["tpot_ms"]) > 0 and min(row["host_ms"]) > 0
        assert row["constraint"] != FREE or row["step_ratio"] == row["tpot_ratio"] == 1
        assert (sum(row["verifications"]) > 0) == bool(row["mean_accepted_length"])
    assert [sum(r["draft_tokens"]) > 0 for r in rows[:3]] == [False] * 3
    assert any(sum(r["draft_tokens"]) > 0 for r in rows[3:])


def test_ratios_are_of_medians_to_the_free_turns_of_the_same_engine():
    llm: Any = SimpleNamespace()
    contender = Contender("trees", llm, 1.15, [[1], [2]])

    def turns(*milliseconds: float) -> list[Speed]:
        return [Speed(ms, 2 * ms, 0.1, 3.0) for ms in milliseconds]

    drafts = SpeculationCounts(proposed=12, accepted=6, verifications=4)
    speeds = {("trees", FREE): turns(10, 30, 11), ("trees", "JSON"): turns(22, 5, 23)}
    accepted = {key: [Acceptance(1, 40, drafts), Acceptance(2, 40, SpeculationCounts())] for key in speeds}
    row = judge(contender, "JSON", speeds, accepted)
    assert (row["tpot_ratio"], row["step_ratio"], row["goal"]) == (2.0, 2.0, 1.15)
    assert (row["complete"], row["mean_accepted_length"]) == ([1, 2], [2.5])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-tokens", "1"], "--max-tokens must be at least 2"),
        (["--set", "seed"], "expected key=value"),
        (["--config", "no.yaml"], "cannot read config no.yaml"),
        (["--set", "max_model_len=64"], "context length is 64"),
    ],
)
def test_what_cannot_be_measured_is_refused(engines, capsys, options, says):
    given = ["--config", "plain.yaml", "--tree-config", "trees.yaml", "--concurrency", "1", *options]
    assert main(["constrained", *given]) == 2
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
    assert all(engine.engine.health == "dead" for engine in engines)


def test_an_answer_of_another_length_is_an_error(engines, capsys, monkeypatch):
    def ending(constraint: str, schema: Any, tokens: int) -> Any:
        return constrained.of_any_length(constraint, {"const": 1}, tokens)

    monkeypatch.setattr(constrained, "of_length", ending)
    given = ["--config", "plain.yaml", "--tree-config", "trees.yaml", "--concurrency", "1", "--max-tokens", "8"]
    assert main(["constrained", *given]) == 2
    assert "an answer with the constraint 'JSON' has not 8 tokens" in capsys.readouterr().err


def test_every_extraction_has_a_schema_that_is_served(engines):
    with tiny.llm(draft=[], compilation_cache_dir="", max_model_len=64, kv_cache_tokens=256, token_buckets=[4],
                  max_num_seqs=4, max_num_batched_tokens=4, page_size=16) as llm:  # fmt: skip
        for extraction in EXTRACTIONS:
            Draft202012Validator.check_schema(extraction.schema)
            llm.engine.constraints.of(constrained.of_length("JSON", extraction.schema, 9), ())
            assert all(key in extraction.prompt for key in extraction.schema["required"])
    assert len({e.prompt for e in EXTRACTIONS}) == len(EXTRACTIONS) == 12


def test_the_command_is_written_out():
    parser = argparse.ArgumentParser()
    constrained.add_arguments(parser)
    args = parser.parse_args(["--set", "a=[1, 2]", "--set", "b=3"])
    assert "--set 'a=[1, 2]' --set b=3" in constrained.command(args) and "--json" not in constrained.command(args)
