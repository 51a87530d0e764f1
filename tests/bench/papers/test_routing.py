"""The experiment of routing policies: the same requests for each, and a page with its tables and figure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxspec.bench.__main__ import main
from jaxspec.bench.papers import routing
from jaxspec.bench.papers.routing import LOAD, ROUTINGS, Case, Data, requests, serve, trace_of
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.arrivals import Arrival


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "traces").mkdir()
    times = np.cumsum(rng.exponential(size=200))
    rows = [f"{t:.3f},{rng.integers(40, 2000)},{rng.integers(20, 200)}\n" for t in times]
    (folder / "traces" / "azure_llm_2023_conv.csv").write_text("arrival_s,input_tokens,output_tokens\n" + "".join(rows))
    lines = []
    for i, t in enumerate(times):
        row = {
            "timestamp": round(1000 * t),
            "input_length": 1200,
            "output_length": 20,
            "hash_ids": [i % 5, 10 + i, 500 + i],
        }
        lines.append(json.dumps(row) + "\n")
    (folder / "traces" / "mooncake_conversation.jsonl").write_text("".join(lines))
    return folder


def test_a_small_experiment(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOGETHER", "SOME", "FEW"):
        monkeypatch.setattr(routing, name, 2)
    options = ["--data", str(folder), "--out", str(tmp_path), "--keep", str(tmp_path), "--processes", "1"]
    options += ["--seeds", "2", "--replicas", "1", "4", "--each", "3", "--more", "3", "--long", "16"]
    assert main(["routing", *options]) == 0
    assert "p99 TTFT, ms" in capsys.readouterr().out
    found = json.loads((tmp_path / "routing.json").read_text())["simulated"]
    places = [(row["replicas"], row["routing"]) for row in found["scaling"]]
    assert places == [(1, "round_robin"), *((4, name) for name in ROUTINGS)]
    assert [row["requests"] for row in found["scaling"]] == [6] + 5 * [12]
    assert found["scaling"][0]["linear throughput"][0] == pytest.approx(1.0)
    hits = {row["routing"]: row["hits"][0] for row in found["prefixes"]}
    assert 0 < hits["round_robin"] < hits["predicted"]
    page = (tmp_path / "routing.md").read_text()
    assert "| `predicted` |" in page and "Simulated, 2 seeds" in page
    assert (tmp_path / "routing.png").read_bytes().startswith(b"\x89PNG")


def test_all_policies_get_the_same_requests_at_the_same_load() -> None:
    rng = np.random.default_rng(1)
    trace = [Arrival(float(t), int(rng.integers(40, 900)), 40) for t in np.cumsum(rng.exponential(size=80))]
    rows = trace_of(Data(trace, []), "quarter")
    assert [a.input_tokens for a in rows] == [(a.input_tokens or 0) // 4 for a in trace]
    works = [requests(rows, Case("quarter", name, 4, 30, 3), 0) for name in ROUTINGS]
    for work, rate in works:
        np.testing.assert_array_equal(work.arrival, works[0][0].arrival)
        assert len(work) == 120 and work.arrival[-1] == pytest.approx(29.5 / rate, rel=0.1)
    one, many = (requests(rows, Case("quarter", "predicted", n, 30, 3), 0)[1] for n in (1, 64))
    assert one == many and LOAD < 1


def test_data_without_blocks_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = folder / "traces" / "azure_llm_2023_conv.csv"
    assert main(["routing", "--trace", str(trace), "--blocks", str(trace), "--out", str(tmp_path)]) == 2
    assert "not every row has hash_ids" in capsys.readouterr().err


def test_few_replicas_are_simulated_several_times() -> None:
    trace = [Arrival(float(i), 80, 40) for i in range(50)]
    found = serve(Data(trace, arrivals.burst(1)), Case("quarter", "round_robin", 8, 2, 0))
    assert 0 < found["ttft"] < found["jct"] and 0 <= found["met"] <= 1 <= found["imbalance"]
