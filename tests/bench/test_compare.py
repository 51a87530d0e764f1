"""`jaxspec.bench compare`: presets on the tiny random model take turns, and wrong ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import tiny
from jaxspec import LLM, SamplingParams
from jaxspec.bench.__main__ import main
from jaxspec.bench.compare import Contender, Turn, Work, alternate, judge, names, take_turn

#: Everything small; a preset adds what it is about.
COMMON = (
    "compilation_cache_dir: ''\nkv_cache_tokens: 1024\nmax_model_len: 128\nmax_num_batched_tokens: 16\npage_size: 16\n"
)
WORK = ["--num-prompts", "4", "--input-tokens", "5:9", "--max-tokens", "6", "--ignore-eos"]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    """The tiny model stands for any; gives the list of what was loaded."""
    loaded: list[LLM] = []

    def load(**settings: Any) -> LLM:
        loaded.append(tiny.llm(**settings | {"show_progress": False}))
        return loaded[-1]

    monkeypatch.setattr("jaxspec.llm.LLM", load)
    monkeypatch.setenv("COLUMNS", "160")
    return loaded


def preset(folder: Path, name: str, more: str) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(COMMON + more)
    return str(path)


def test_presets_take_turns_on_the_same_prompts(engines, tmp_path, capsys, monkeypatch):
    asked: list[tuple[int, int]] = []
    generate = LLM.generate

    def recorded(llm: LLM, prompts: Any, params: Any) -> Any:
        asked.append((engines.index(llm), len(prompts)))
        return generate(llm, prompts, params)

    monkeypatch.setattr(LLM, "generate", recorded)
    files = [preset(tmp_path, "one", "max_num_seqs: 4\n"), preset(tmp_path, "two", "max_num_seqs: 2\n")]
    out = tmp_path / "new" / "results.json"
    options = ["--repeats", "2", "--concurrency", "1", "3", "--set", "token_buckets=[16]", "--json", str(out)]
    assert main(["compare", *files, *WORK, *options]) == 0

    one_turn_each = [(0, 1)] * 4 + [(1, 1)] * 4
    assert asked == one_turn_each * 3 + [(0, 3), (0, 1), (1, 3), (1, 1)] * 3
    assert [engine.engine.health for engine in engines] == ["dead", "dead"]
    report = json.loads(out.read_text())
    results = report["results"]
    assert [(r["preset"], r["concurrency"]) for r in results] == [("one", 1), ("two", 1), ("one", 3), ("two", 3)]
    for r, base in zip(results, (results[0], results[0], results[2], results[2]), strict=True):
        assert r["output_tokens"] == [24, 24] and r["agreeing_requests"] == 4
        speeds = [tokens / seconds for tokens, seconds in zip(r["output_tokens"], r["seconds"], strict=True)]
        assert r["tokens_per_s"] == pytest.approx(speeds)
        assert r["lowest"] <= r["median"] <= r["highest"] and r["ratio"] == pytest.approx(r["median"] / base["median"])
    assert [s["max_num_seqs"] for s in report["settings"].values()] == [4, 2]
    assert all(s["token_buckets"] == [16] for s in report["settings"].values())
    said = capsys.readouterr().out
    assert "4/4" in said and "1.000" in said and "accepted" not in said


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ("no_such_setting: 1\n", "unknown setting 'no_such_setting'"),
        ("[", "cannot read config"),
        ("max_num_seqs: 32\n", "max_num_batched_tokens (16) must be at least max_num_seqs (32)"),
        ("max_num_seqs: 2\nkv_cache_tokens: 16\ntoken_buckets: [16]\n", "the context length is 16"),
    ],
)
def test_a_preset_that_cannot_be_served_is_named(engines, tmp_path, capsys, second, says):
    files = [preset(tmp_path, "good", "max_num_seqs: 2\ntoken_buckets: [16]\n"), preset(tmp_path, "bad", second)]
    assert main(["compare", *files, "--num-prompts", "1", "--input-tokens", "20", "--max-tokens", "2"]) == 2
    said = capsys.readouterr().err
    assert says in said and "bad" in said and "Traceback" not in said
    assert all(engine.engine.health == "dead" for engine in engines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no.yaml", "no.yaml"], "cannot read config no.yaml"),
        (["no.yaml", "no.yaml", "--set", "seed"], "expected key=value"),
        (["no.yaml", "no.yaml", "--temperature", "-1"], "temperature must be"),
        (["no.yaml", "no.yaml", "--prompts", "/nonexistent.jsonl"], "nonexistent.jsonl"),
    ],
)
def test_errors_are_reported_before_an_engine_is_loaded(engines, capsys, arguments, says):
    assert main(["compare", *arguments]) == 2
    assert says in capsys.readouterr().err and not engines


def test_one_preset_is_not_enough(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["compare", "a.yaml"])
    assert exit.value.code == 2 and "B.yaml" in capsys.readouterr().err


def test_names_distinguish_presets():
    assert names(["x/a.yaml", "x/b.yaml"]) == ["a", "b"]
    assert names(["x/a.yaml", "y/a.yaml"]) == ["x/a.yaml", "y/a.yaml"]
    assert names(["a.yaml", "a.yaml", "b.yaml"]) == ["a #1", "a #2", "b"]


class Drafter:
    """Stands for an `LLM` that answers each prompt with its own tokens; five drafts, two accepted, one verification."""

    def __init__(self) -> None:
        self.asked = 0
        self.engine = self

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(draft_tokens=5 * self.asked, accepted_tokens=2 * self.asked, verifications=self.asked)

    def generate(self, prompts: list[list[int]], _: SamplingParams) -> list[Any]:
        self.asked += len(prompts)
        metrics = SimpleNamespace(e2e=2.0)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(p))], metrics=metrics) for p in prompts]


def test_acceptance_is_counted_in_measured_turns():
    first: Any = Drafter()
    second: Any = Drafter()
    contenders = [Contender("plain", first, [[1, 2], [3]]), Contender("draft", second, [[1, 2], [4]])]
    advanced: list[int] = []
    work = Work([SamplingParams()] * 2, 2, 1)
    turns = alternate(contenders, work, 3, lambda: advanced.append(1))
    assert len(advanced) == 8 and [len(own) for own in turns] == [3, 3]
    assert turns[0][0].counts == {"draft_tokens": 10, "accepted_tokens": 4, "verifications": 2}
    assert turns[0][0].e2e == 2.0
    plain, draft = judge(contenders, turns, work)
    assert (draft["draft_tokens"], draft["accepted_tokens"], draft["verifications"]) == (30, 12, 6)
    assert (draft["acceptance_rate"], draft["mean_accepted_length"]) == (0.4, 3.0)
    assert plain["agreeing_requests"] == 2 and draft["agreeing_requests"] is None  # other ids: another tokenizer


def test_answers_agree_token_for_token_in_every_turn():
    llm: Any = SimpleNamespace(engine=SimpleNamespace(stats=lambda: SimpleNamespace()), generate=lambda *_: [])
    prompts = [[1], [2], [3]]
    contenders = [Contender("a", llm, prompts), Contender("b", llm, prompts)]
    work = Work([SamplingParams()] * 3, 3, 2)
    llm.generate = lambda ids, _: [
        SimpleNamespace(outputs=[SimpleNamespace(token_ids=i)], metrics=SimpleNamespace(e2e=1.0)) for i in ids
    ]
    assert take_turn(contenders[0], work, 0).counts == dict.fromkeys(
        ("draft_tokens", "accepted_tokens", "verifications"), 0
    )

    def turn(seconds: float, *answers: list[int]) -> Turn:
        return Turn(seconds, list(answers), {"draft_tokens": 0, "accepted_tokens": 0, "verifications": 0}, 2 * seconds)

    baseline = [turn(1.0, [1, 2], [3], [4]), turn(2.0, [1, 2], [3], [4])]
    other = [turn(0.5, [1, 2], [3], [4]), turn(1.0, [1, 2], [3, 3], [5])]
    a, b = judge(contenders, (baseline, other), work)
    assert (a["tokens_per_s"], b["tokens_per_s"]) == ([4, 2], [8, 5])
    assert (a["agreeing_requests"], b["agreeing_requests"]) == (3, 1)
    assert (a["ratio"], b["ratio"]) == (1.0, pytest.approx(6.5 / 3))
    assert (a["e2e_ratio"], b["e2e_ratio"], b["mean_e2e_s"]) == (1.0, 0.5, [1.0, 2.0])
    assert b["acceptance_rate"] is None and b["mean_accepted_length"] is None


def test_each_turn_has_prompts_of_its_own(engines, tmp_path, monkeypatch):
    asked: tuple[list[list[int]], list[list[int]]] = ([], [])
    generate = LLM.generate

    def recorded(llm: LLM, prompts: Any, params: Any) -> Any:
        asked[engines.index(llm)].extend(list(p) for p in prompts)
        return generate(llm, prompts, params)

    monkeypatch.setattr(LLM, "generate", recorded)
    known, new = tmp_path / "known.jsonl", tmp_path / "new.jsonl"
    known.write_text("".join(json.dumps({"turns": [f"known {i}"]}) + "\n" for i in range(5)))
    new.write_text("".join(json.dumps({"turns": [f"new {i}"]}) + "\n" for i in range(18)))
    files = [preset(tmp_path, name, f"max_num_seqs: 4\ndraft: [{name}]\n") for name in ("none", "suffix")]
    out = tmp_path / "results.json"
    options = ["--num-prompts", "3", "--repeats", "2", "--concurrency", "1", "3", "--max-tokens", "4"]
    options += ["--prompts", str(new)]
    more = ["--new-prompts", "--known", str(known), "--num-known", "4", "--json", str(out)]
    assert main(["compare", *files, *options, *more]) == 0
    assert (len(asked[0]), len(asked[1])) == (2 * 3 * 3, 4 + 2 * 3 * 3) and len(
        {*map(tuple, asked[1])}
    ) == 4 + 2 * 3 * 3
    for r in json.loads(out.read_text())["results"]:
        assert r["agreeing_requests"] == 6 and len(r["turn_ratios"]) == 2
        assert min(r["turn_ratios"]) <= r["ratio"] <= max(r["turn_ratios"])
    assert main(["compare", *files, *options, "--new-prompts", "--num-prompts", "4"]) == 2


def test_structured_answers_match_their_schemas(engines, tmp_path, monkeypatch, capsys):
    answers: list[tuple[Any, str]] = []
    generate = LLM.generate

    def recorded(llm: LLM, prompts: Any, params: Any) -> Any:
        outputs = generate(llm, prompts, params)
        answers.extend((p.structured_outputs, o.outputs[0].text) for p, o in zip(params, outputs, strict=True))
        return outputs

    monkeypatch.setattr(LLM, "generate", recorded)
    files = [preset(tmp_path, name, f"max_num_seqs: 4\ndraft: [{name}]\n") for name in ("none", "grammar")]
    options = ["--structured", "--num-prompts", "2", "--repeats", "1", "--max-tokens", "40"]
    assert main(["compare", *files, *options, "--set", "max_model_len=512"]) == 0
    assert len(answers) == 8 and all(text.lstrip().startswith("{") for _, text in answers)
    assert len({str(structure.json) for structure, _ in answers}) == 2
    assert main(["compare", *files, "--structured", "--ignore-eos"]) == 2
    assert "--ignore-eos" in capsys.readouterr().err


def test_turns_are_drawn(tmp_path):
    from jaxspec.bench import plot

    path = tmp_path / "turns.png"
    plot.turns(path, {"1 at a time": {"a": [3.0, 4.0], "b": [5.0, 6.0]}, "4 at a time": {"a": [9.0]}}, "tokens/s")
    assert path.read_bytes().startswith(b"\x89PNG")
