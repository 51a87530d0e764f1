"""`jaxspec.bench simulate` with several presets, rates and seeds, as its users call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.bench import plot
from jaxspec.bench.__main__ import main
from jaxspec.bench.estimates import differs, relative
from jaxspec.bench.simulations import digits

COMMON = ["--num-requests", "40", "--output-tokens", "20:0.8", "--cost", "llama-7b-l20", "--set", "max_num_seqs=2"]


@pytest.fixture
def presets(tmp_path: Path) -> list[str]:
    """FCFS, SJF, and FCFS under another name."""
    texts = {"fcfs": "order: fcfs\ndraft: []\n", "sjf": "order: sjf\npredictor: oracle\ndraft: []\n"}
    for name, text in (texts | {"same": texts["fcfs"]}).items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return [str(tmp_path / f"{name}.yaml") for name in ("fcfs", "sjf", "same")]


def simulate(tmp_path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    assert main(["simulate", *options, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_presets_serve_the_same_requests(tmp_path, presets, capsys):
    pictures = [tmp_path / "cdf.png", tmp_path / "timeline.png"]
    options = [*COMMON, "--burst", "--slo-ttft-ms", "2000", "--plot", str(pictures[0]), "--timeline", str(pictures[1])]
    found = simulate(tmp_path, "--config", *presets, *options)
    rows = {row["preset"]: row for row in found["results"]}
    assert list(rows) == ["fcfs", "sjf", "same"]
    arrivals = [[(s["start"], s["output_tokens"]) for s in row["report"]["samples"]] for row in rows.values()]
    assert arrivals[0] == arrivals[1] == arrivals[2] and len(arrivals[0]) == 40
    mean = {name: row["by_seed"]["mean_jct_s"] for name, row in rows.items()}
    assert mean["same"] == mean["fcfs"] and mean["sjf"][0] < 0.8 * mean["fcfs"][0]
    # Each one is what the preset gives alone.
    alone = simulate(tmp_path, "--config", presets[1], *options[:-4])
    assert alone["e2e_ms"]["mean"] / 1e3 == mean["sjf"][0]
    assert alone["extra"]["busy_fraction"] == rows["sjf"]["by_seed"]["utilisation"][0]
    said = capsys.readouterr().out
    assert all(word in said for word in ("fcfs", "sjf", "queue", "TPOT", "busy", "empted")) and "≈" not in said
    assert found["notes"] and all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_rates_and_seeds(tmp_path, presets, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    picture = tmp_path / "rates.png"
    sweep = ["--request-rate", "0.5", "8", "--seeds", "4", "--plot", str(picture)]
    found = simulate(tmp_path, "--config", *presets, *COMMON, *sweep)
    rows = found["results"]
    assert [(row["preset"], row["request_rate"]) for row in rows] == [
        (name, rate) for rate in (0.5, 8) for name in ("fcfs", "sjf", "same")
    ]
    values = rows[4]["by_seed"]["mean_jct_s"]
    assert len(set(values)) == 4
    mean, low, high = rows[4]["estimates"]["mean_jct_s"]
    assert low < mean < high and mean == pytest.approx(np.mean(values), rel=1e-3)
    assert "mean_jct_s" in rows[4]["differing"]
    # The first preset does not differ from itself, whatever its name.
    assert [rows[i]["differing"] for i in (0, 2, 3, 5)] == [[]] * 4
    said = capsys.readouterr().out
    assert "±" in said and "≈" in said and "over 4 seeds" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    # A seed is what --seed gives.
    one = simulate(tmp_path, "--config", presets[1], *COMMON, "--request-rate", "8", "--seed", "2")
    assert one["e2e_ms"]["mean"] / 1e3 == values[2]


def test_a_narrow_terminal_shows_whole_names(tmp_path, presets, capsys, monkeypatch):
    """And no number is cut: columns that do not fit come in a table below."""
    names = [f"a_name_of_{10 * 'x'}_{end}" for end in ("one", "two")]
    for name, preset in zip(names, presets, strict=False):
        (tmp_path / f"{name}.yaml").write_text(Path(preset).read_text())
    short, long = presets[:2], [str(tmp_path / f"{name}.yaml") for name in names]
    lines: dict[str, list[str]] = {}
    for width in ("80", "200"):
        monkeypatch.setenv("COLUMNS", width)
        for kind, given in (("short", short), ("long", long)):
            simulate(tmp_path, "--config", *given, *COMMON, "--request-rate", "0.5", "8", "--seeds", "2")
            said = capsys.readouterr().out
            lines[f"{kind} {width}"] = said[said.index("presets, simulated") :].splitlines()
    for found in lines.values():
        assert not any("…" in line for line in found)
    assert max(len(line) for kind in ("short 80", "long 80") for line in lines[kind]) <= 80
    shown = {
        key: sum(names[1] in line or line.split()[1:2] == ["sjf"] for line in found) for key, found in lines.items()
    }
    assert shown == {"short 80": 2, "short 200": 2, "long 80": 4, "long 200": 2}, "two rates, in one or two tables"


def test_seeds_vary_drafts_and_predictions_of_the_same_requests(tmp_path, presets):
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens\n0,30,60\n0,10,40\n")
    drafting = tmp_path / "drafting.yaml"
    drafting.write_text("order: fcfs\ndraft: ngram\n")
    options = ["--trace", str(tmp_path / "t.csv"), "--seeds", "3", "--cost", "llama-7b-l20"]
    found = simulate(tmp_path, "--config", presets[0], str(drafting), *options)
    assert found["notes"][0] == (
        "drafting: seeds: arrivals and lengths are the same with every seed; what varies: which drafts are accepted"
    )
    fixed, varied = (len(set(row["by_seed"]["mean_jct_s"])) for row in found["results"])
    assert fixed == 1 and varied == 3
    simulate(tmp_path, "--config", presets[1], *options, "--set", "predictor=noisy_oracle")


def test_notes_name_presets_and_rates(tmp_path, presets):
    found = simulate(tmp_path, "--config", *presets[:2], *COMMON[:-2], "--request-rate", "0.5", "50", "--seeds", "2")
    assert found["notes"][0].startswith("lengths")
    assert any(note.startswith("first seed: 0.5 requests/s: queue: no") for note in found["notes"])
    (tmp_path / "las.yaml").write_text("order: las\ndraft: []\nkv_cache_tokens: 128\npage_size: 16\n")
    options = ["--burst", "--num-requests", "30", "--output-tokens", "20:0.2", "--set", "max_num_seqs=2"]
    found = simulate(tmp_path, "--config", presets[0], str(tmp_path / "las.yaml"), *options, "--input-tokens", "20")
    assert any(note.startswith("las: memory: ") for note in found["notes"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "A", "B", "--burst", "--replicas", "2"], "--replicas compares routing policies: give --config"),
        (["--request-rate", "1", "2", "--replicas", "2"], "give --request-rate one value"),
        (["--burst", "--request-rate", "1", "2"], "--burst: all requests arrive at once"),
        (["--seeds", "2", "--routing", "round_robin", "--request-rate", "2"], "--routing needs --replicas"),
        (["--trace", "TRACE", "--seeds", "3"], "--seeds: every seed gives the same results here"),
        (["--burst", "--replicas", "2", "--timeline", "x.png"], "--timeline shows one run"),
        (["--config", "A", "missing.yaml", "--burst"], "missing.yaml"),
    ],
)
def test_errors_are_one_line(options, message, presets, tmp_path, capsys):
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens\n0,30,3\n1,10,2\n")
    paths = {"A": presets[0], "B": presets[1], "TRACE": str(tmp_path / "t.csv")}
    assert main(["simulate", *(paths.get(option, option) for option in options)]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err and "\n" not in err


def test_one_run_has_a_timeline(tmp_path):
    picture = tmp_path / "timeline.png"
    simulate(tmp_path, "--request-rate", "4", *COMMON, "--num-requests", "100", "--timeline", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_distributions_fit_their_axes(tmp_path, monkeypatch):
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "save", lambda figure, path: drawn.append(figure))
    panels = [
        plot.Panel("TTFT", {"a": [120.0, 130.0], "b": [5.0]}, 2000.0),
        plot.Panel("TPOT", {"": [0.01, 0.02, None]}, 500.0),
        plot.Panel("none", {"": [None]}, 500.0),
    ]
    plot.distributions(tmp_path / "x.png", panels, "title")
    seconds, far, empty = drawn[0].axes
    assert seconds.get_xlabel() == "TTFT, s" and seconds.get_xlim()[1] > 130
    assert [text.get_text() for text in seconds.get_legend().get_texts()] == ["a", "b", "target 2 s"]
    assert far.get_xlabel() == "TPOT, ms" and far.get_xlim()[1] == pytest.approx(21)
    assert [text.get_text() for text in far.get_legend().get_texts()] == ["target 500 ms, right of the axis"]
    assert empty.get_xlim()[1] > 500


def test_noise_is_judged_by_pairs():
    # All differences are 1 ± 0.1: far from 0, although the values themselves vary much more.
    base = [10.0, 20.0, 30.0, 40.0]
    assert differs([11.1, 20.9, 31.1, 40.9], base)
    assert not differs([11.0, 19.0, 31.5, 38.5], base)
    assert not differs(base, base) and not differs([2.0], [1.0]) and not differs([None, 3.0], [1.0, 2.0])
    found = relative([2.0, 8.0], [1.0, 16.0])
    assert found is not None and found.mean == pytest.approx(1.0) and found.low < 0.01 and found.high > 100
    assert relative([0.0], [1.0]) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0138, "0.014"), (0.123456, "0.123"), (4.056, "4.06"), (44.86, "44.9"), (2357, "2,357")],
)
def test_three_digits(value, text):
    assert digits(3)(value) == text
