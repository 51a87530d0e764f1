"""Continued answers: the best prediction's error is that of what is really random, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import tiny
from helpers.jsonl import write_lines
from jaxspec.bench.record import drive
from jaxspec.train_predictor import continuations


def test_the_error_is_that_of_what_chance_decides() -> None:
    rng = np.random.default_rng(0)
    own = rng.lognormal(5, 1, 400)
    found = {
        share: own[:, None] * np.exp(spread * rng.normal(size=(400, 9))) for share, spread in ((0.0, 0.4), (0.5, 0.1))
    }
    table = continuations.report(own, found, 0).splitlines()
    assert table[2].startswith("| 0% | 0.1") and table[2].endswith("| – |")
    ratio = float(table[3].split("|")[3].split("(")[0])
    assert 0.15 < ratio < 0.4, "a quarter of the spread"
    same = continuations.report(own, {0.0: own[:, None].repeat(3, 1)}, 0)
    assert "0.00 (0.00 … 0.00)" in same


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Continues answers of the test part, each with the tokens that it begins with."""
    target = tiny.model()
    rows: list[dict[str, Any]] = [
        {"prompt_ids": [i, 7, 2 * i], "output_ids": list(range(40 + i)), "finished": True, "temperature": 0.8}
        for i in range(40)
    ]
    data, out = write_lines(tmp_path / "answers.jsonl", rows), tmp_path / "continued.jsonl"
    monkeypatch.setattr(continuations, "load_model", lambda name: target)
    seen: list[list[int]] = []

    def recorded(engine: Any, times: Any, prompts: list[list[int]], *more: Any) -> Any:
        seen.extend(prompts)
        return drive(engine, times, prompts, *more)

    monkeypatch.setattr(continuations, "drive", recorded)
    small = "token_buckets=[16]", "max_num_batched_tokens=16", "max_num_seqs=4", "kv_cache_tokens=1024", "page_size=16"
    settings = [f"--set={pair}" for pair in (*small, "compilation_cache_dir=", "max_model_len=128")]
    options = ["--data", str(data), "--shares", "0", "0.5", "--each", "2", "--limit", "3", "--max-tokens", "60"]
    assert continuations.main([*options, *settings, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 continuations each" in said and "| 50% |" in said
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["share"] for line in lines} == {0.0, 0.5} and 2 <= len(lines) <= 6
    halves = {tuple(prompt[3:]) for prompt in seen if len(prompt) > 3}
    for line in lines:
        assert len(line["continued"]) == 2 and max(line["continued"]) <= 60
        if line["share"]:
            half = line["length"] // 2
            assert tuple(range(half)) in halves and min(line["continued"]) > half

    assert continuations.main(["--data", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxspec.train_predictor.continuations: --data: cannot read") and error.count("\n") == 1
    greedy = write_lines(tmp_path / "greedy.jsonl", [row | {"temperature": 0} for row in rows])
    assert continuations.main(["--data", str(greedy)]) == 2
    assert "no sampled answers of the test part" in capsys.readouterr().err
