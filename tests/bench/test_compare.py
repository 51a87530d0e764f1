"""`jaxspec.bench compare`: presets on the tiny random model take turns, and wrong ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers import tiny
from jaxspec import LLM, SamplingParams
from jaxspec.bench.__main__ import main
from jaxspec.bench.compare import judge
from jaxspec.bench.contender import Contender
from jaxspec.bench.options import preset_names
from jaxspec.bench.record import drive
from jaxspec.bench.report import Sample, Slo, summarise
from jaxspec.bench.turns import COUNTERS, Turn, Work, alternate, take_turn

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

    alone, together = [[(i, 1)] * 4 for i in (0, 1)], [[(i, 3), (i, 1)] for i in (0, 1)]
    rounds = (0, 1), (1, 0), (0, 1)  # they take turns to begin
    assert asked == [call for calls in (alone, together) for both in rounds for i in both for call in calls[i]]
    assert [engine.engine.health for engine in engines] == ["dead", "dead"]
    report = json.loads(out.read_text())
    results = report["results"]
    assert [(r["preset"], r["concurrency"]) for r in results] == [("one", 1), ("two", 1), ("one", 3), ("two", 3)]
    for r, base in zip(results, (results[0], results[0], results[2], results[2]), strict=True):
        assert r["output_tokens"] == [24, 24] and r["agreeing_requests"] == 4
        speeds = [tokens / seconds for tokens, seconds in zip(r["output_tokens"], r["seconds"], strict=True)]
        found = r["by_turn"]["tokens_per_s"]
        assert found == pytest.approx(speeds) and r["medians"]["tokens_per_s"] == pytest.approx(np.median(speeds))
        mean, low, high = r["ratios"]["tokens_per_s"]
        assert mean == pytest.approx(np.exp(np.mean(np.log(found) - np.log(base["by_turn"]["tokens_per_s"]))), rel=1e-3)
        assert low <= mean <= high and r["noise"]["tokens_per_s"] == (low <= 1 <= high)
        assert r["medians"]["p99_e2e_ms"] >= r["medians"]["mean_e2e_ms"] > r["medians"]["mean_ttft_ms"] > 0
        assert r["medians"]["slo_attainment"] is None
    assert [s["max_num_seqs"] for s in report["settings"].values()] == [4, 2]
    assert all(s["token_buckets"] == [16] for s in report["settings"].values())
    said = capsys.readouterr().out
    assert "4/4" in said and "1.000" in said and "accepted" not in said
    assert all(row in said for row in ("TTFT, p99", "TPOT, mean", "E2E, mean", "3 at once")) and "SLOs" not in said


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
    assert preset_names(["x/a.yaml", "x/b.yaml"]) == ["a", "b"]
    assert preset_names(["x/a.yaml", "y/a.yaml"]) == ["x/a.yaml", "y/a.yaml"]
    assert preset_names(["a.yaml", "a.yaml", "b.yaml"]) == ["a #1", "a #2", "b"]


class Drafter:
    """Stands for an `LLM` that answers each prompt with its own tokens; five drafts, two accepted, one verification."""

    def __init__(self) -> None:
        self.asked = 0
        self.engine = self

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(draft_tokens=5 * self.asked, accepted_tokens=2 * self.asked, verifications=self.asked)

    def generate(self, prompts: list[list[int]], _: Any) -> list[Any]:
        self.asked += len(prompts)
        metrics = SimpleNamespace(arrival=3.0, ttft=0.5, tpot=0.1, e2e=2.0)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(p))], metrics=metrics) for p in prompts]


def test_acceptance_is_counted_in_measured_turns():
    first: Any = Drafter()
    second: Any = Drafter()
    contenders = [Contender("plain", first, [[1, 2], [3]]), Contender("draft", second, [[1, 2], [4]])]
    advanced: list[int] = []
    work = Work([SamplingParams()] * 2, 2, 1, slo=Slo(ttft_ms=400))
    turns = alternate(contenders, work, 3, lambda: advanced.append(1))
    assert len(advanced) == 8 and [len(own) for own in turns] == [3, 3]
    assert turns[0][0].counts == {"draft_tokens": 10, "accepted_tokens": 4, "verifications": 2}
    assert turns[0][0].report.e2e_ms is not None and turns[0][0].report.e2e_ms.mean == 2000
    plain, draft = judge(contenders, turns, work)
    assert (draft["draft_tokens"], draft["accepted_tokens"], draft["verifications"]) == (30, 12, 6)
    assert (draft["acceptance_rate"], draft["mean_accepted_length"]) == (0.4, 3.0)
    assert plain["agreeing_requests"] == 2 and draft["agreeing_requests"] is None  # other ids: another tokenizer
    # No request meets the target, so there is no ratio of shares.
    assert draft["medians"]["slo_attainment"] == 0 and draft["ratios"]["slo_attainment"] is None


def turn(seconds: float, *answers: list[int]) -> Turn:
    """A turn whose requests took twice its time."""
    samples = [Sample(0.0, seconds, None, 2 * seconds, output_tokens=len(answer)) for answer in answers]
    counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)
    return Turn(list(answers), counts, summarise("compare", samples, seconds, options={}))


def test_answers_agree_token_for_token_in_every_turn():
    llm: Any = SimpleNamespace(engine=SimpleNamespace(stats=lambda: SimpleNamespace()), generate=Drafter().generate)
    contenders = [Contender(name, llm, [[1], [2], [3]]) for name in ("a", "b")]
    work = Work([SamplingParams()] * 3, 3, 2)
    assert {*take_turn(contenders[0], work, 0).counts.values()} == {0}
    baseline = [turn(1.0, [1, 2], [3], [4]), turn(2.0, [1, 2], [3], [4])]
    other = [turn(0.5, [1, 2], [3], [4]), turn(1.0, [1, 2], [3, 3], [5])]
    a, b = judge(contenders, (baseline, other), work)
    assert (a["by_turn"]["tokens_per_s"], b["by_turn"]["tokens_per_s"]) == ([4, 2], [8, 5])
    assert (a["agreeing_requests"], b["agreeing_requests"]) == (3, 1)
    assert a["ratios"]["tokens_per_s"] == (1, 1, 1) and b["ratios"]["tokens_per_s"][0] == pytest.approx(
        5**0.5, rel=1e-4
    )
    assert (
        b["ratios"]["mean_e2e_ms"] == pytest.approx((0.5, 0.5, 0.5), rel=1e-4) and b["medians"]["mean_e2e_ms"] == 1500
    )
    assert (b["noise"]["tokens_per_s"], b["noise"]["mean_e2e_ms"]) == (True, False)
    assert b["ratios"]["mean_tpot_ms"] is None
    assert b["acceptance_rate"] is None and b["mean_accepted_length"] is None
    # One turn shows no difference.
    assert judge(contenders, (baseline[:1], other[:1]), work)[1]["noise"]["tokens_per_s"]


@pytest.mark.slow
def test_every_turn_has_the_same_arrivals(engines, tmp_path, capsys, monkeypatch):
    driven: list[tuple[int, list[float], list[int], list[int]]] = []

    def recorded(engine: Any, times: Any, ids: Any, params: Any, **more: Any) -> Any:
        number = [llm.engine for llm in engines].index(engine)
        driven.append((number, list(times), [len(i) for i in ids], [p.max_tokens for p in params]))
        return drive(engine, times, ids, params, **more)

    monkeypatch.setattr("jaxspec.bench.turns.drive", recorded)
    files = [preset(tmp_path, "one", "max_num_seqs: 4\n"), preset(tmp_path, "two", "max_num_seqs: 2\n")]
    out, picture = tmp_path / "results.json", tmp_path / "turns.png"
    few = [*WORK, "--repeats", "2", "--set", "token_buckets=[16]", "--json", str(out), "--plot", str(picture)]
    slo = ["--slo-ttft-ms", "60000", "--slo-tpot-ms", "50000"]
    assert main(["compare", *files, *few, "--request-rate", "50", "--burstiness", "2", *slo]) == 0
    assert [number for number, *_ in driven] == [0, 1, 1, 0, 0, 1]
    assert all(row[1:] == driven[0][1:] for row in driven) and len(set(driven[0][1])) == 4
    report = json.loads(out.read_text())
    assert [settings["slo"]["ttft_ms"] for settings in report["settings"].values()] == [60000, 60000]
    for r in report["results"]:
        assert r["output_tokens"] == [24, 24] and r["medians"]["slo_attainment"] == 1 and r["agreeing_requests"] == 4
    said = capsys.readouterr().out
    assert "SLOs met" in said and "at\n" not in said and picture.read_bytes().startswith(b"\x89PNG")
    # A trace also says how long prompts and answers are.
    driven.clear()
    engines.clear()
    (tmp_path / "t.csv").write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,x,9,3,12,y\n5.1,x,7,4,11,y\n"
    )
    few = ["--num-prompts", "5", "--ignore-eos", "--repeats", "1", "--set", "token_buckets=[16]"]
    assert main(["compare", *files, *few, "--trace", str(tmp_path / "t.csv"), "--json", str(out)]) == 0
    assert driven[0] == (0, [0, pytest.approx(0.1)], [9, 7], [3, 4])
    assert json.loads(out.read_text())["results"][1]["output_tokens"] == [7]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--request-rate", "1", "--concurrency", "2"], "--request-rate says when prompts arrive: it excludes --conc"),
        (["--trace", "t.csv", "--input-tokens", "3"], "--trace says how long prompts are: it excludes --input-tokens"),
        (["--trace", "/nonexistent.csv"], "/nonexistent.csv"),
        (["--request-rate", "1", "--burstiness", "-1"], "burstiness"),
    ],
)
def test_wrong_arrivals_are_reported_before_an_engine_is_loaded(engines, capsys, options, says):
    assert main(["compare", "a.yaml", "b.yaml", *options]) == 2
    assert says in capsys.readouterr().err and not engines


def test_loading_names_the_preset(engines, tmp_path, monkeypatch):
    shown: list[Any] = []
    load = tiny.llm
    monkeypatch.setattr("jaxspec.llm.LLM", lambda **s: shown.append(s.pop("show_progress")) or load(**s))
    files = [preset(tmp_path, "one", "max_num_seqs: 4\n"), preset(tmp_path, "two", "max_num_seqs: 2\n")]
    few = [*WORK, "--num-prompts", "1", "--max-tokens", "2", "--repeats", "1", "--set", "token_buckets=[16]"]
    assert main(["compare", *files, *few]) == 0
    assert shown == ["one", "two"]


@pytest.mark.slow
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
        assert r["agreeing_requests"] == 6 and len(r["by_turn"]["tokens_per_s"]) == 2
    assert main(["compare", *files, *options, "--new-prompts", "--num-prompts", "4"]) == 2


@pytest.mark.slow
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
