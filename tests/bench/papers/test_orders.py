"""The map of orders: the same requests in every cell, a page with its tables and figure, and sane directions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers import doc_data
from helpers.jsonl import write_lines
from jaxspec.bench.__main__ import main
from jaxspec.bench.papers import orders, orders_engine, recorded
from jaxspec.bench.papers.orders import ARRIVALS, PREDICTORS, Cell, Data, workload
from jaxspec.sched.request import Request
from jaxspec.sched.sim.arrivals import Arrival
from jaxspec.sched.sim.workload import Lengths


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in ("lengths", "traces"):
        (folder / name).mkdir()
    outputs = rng.integers(5, 400, 200)
    rows = "".join(f"{n},{min(4, n // 100)}\n" for n in outputs)
    (folder / "lengths" / "ssjf_vicuna13b_predictions.csv").write_text("output_tokens,pred_class5\n" + rows)
    times = np.cumsum(rng.exponential(size=300))
    (folder / "traces" / "azure_llm_2023_conv.csv").write_text("arrival_s\n" + "".join(f"{t}\n" for t in times))
    return folder


@pytest.mark.slow
def test_a_small_map(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", str(files), "--out", str(tmp_path), "--keep", str(tmp_path), "--num-requests", "120"]
    options += ["--arrivals", "poisson", "--loads", "1.3", "--seeds", "2", "--processes", "1"]
    assert main(["orders", *options, "--predictors", "none", "oracle", "--orders", "sjf", "gittins", "las"]) == 0
    assert "share of the largest gain" in capsys.readouterr().out
    cells = json.loads((tmp_path / "orders.json").read_text())["simulated"]["cells"]
    mean = {(row["order"], row["predictor"]): row["mean"][0] for row in cells}
    assert mean.pop(("fcfs", "none")) == 1
    assert mean.keys() == {
        ("sjf", "none"),
        ("sjf", "oracle"),
        ("gittins", "none"),
        ("gittins", "oracle"),
        ("las", "none"),
    }
    assert mean["sjf", "oracle"] < 0.9 and mean["gittins", "oracle"] < 0.95 and mean["sjf", "none"] == 1
    page = (tmp_path / "orders.md").read_text()
    assert "**poisson, load 1.3**" in page and "| sjf | oracle |" in page
    assert (tmp_path / "orders.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_all_orders_and_predictors_get_the_same_requests(arrivals: str) -> None:
    rng = np.random.default_rng(1)
    lengths = Lengths(np.zeros(50, int), rng.integers(5, 300, 50), rng.uniform(5, 300, 50))
    data = Data(lengths, [Arrival(float(t)) for t in np.cumsum(rng.exponential(size=80))])
    works = [workload(data, Cell(arrivals, 0.9, p, order, 3, 40))[0] for p in PREDICTORS for order in ("fcfs", "sjf")]
    for work in works:
        np.testing.assert_array_equal(work.arrival, works[0].arrival)
        np.testing.assert_array_equal(work.output, works[0].output)
    other, _ = workload(data, Cell(arrivals, 0.9, "none", "fcfs", 4, 40))
    assert not np.array_equal(other.output, works[0].output)


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    """Answers whose proxy sees nothing, and whose probe sees everything."""
    lines = []
    for i in range(60):
        output = 400 if i % 3 == 0 else 20
        left = [float(output - n) for n in range(10, output, 10)]
        lines.append({
            "input_tokens": 30, "output_tokens": output, "proxy": 100, "retrieval": 100, "blend": output, "every": 10,
            "left": left,
        })  # fmt: skip
    return write_lines(tmp_path / "predictions.jsonl", lines)


@pytest.mark.slow
def test_a_map_of_recorded_predictions(
    files: Path, tmp_path: Path, predictions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(files), "--out", str(tmp_path), "--keep", str(tmp_path), "--num-requests", "150"]
    options += ["--arrivals", "poisson", "--loads", "1.2", "--seeds", "2", "--processes", "1", "--orders", "srpt"]
    assert main(["orders", *options, "--predictions", str(predictions)]) == 0
    cells = json.loads((tmp_path / "orders.json").read_text())["recorded"]["cells"]
    mean = {row["predictor"]: row["mean"][0] for row in cells if row["order"] == "srpt"}
    assert mean["none"] == 1 and mean["blend"] == pytest.approx(mean["oracle"], rel=0.05)
    assert mean["oracle"] < mean["probe"] < mean["proxy"] == mean["retrieval"] == 1, "the probe sees early what is long"
    assert "<!-- recorded -->" in (tmp_path / "orders.md").read_text() and (tmp_path / "orders_recorded.png").exists()
    capsys.readouterr()
    assert main(["orders", *options, "--predictions", str(predictions), "--predictors", "noisy"]) == 2
    assert "--predictors: noisy" in capsys.readouterr().err
    predictions.write_text('{"output_tokens": 3}\n')
    assert main(["orders", *options, "--predictions", str(predictions)]) == 2
    assert "line 1: has no input_tokens" in capsys.readouterr().err


def test_a_recorded_probe_counts_down_between_its_values(predictions: Path) -> None:
    table = recorded.read(predictions)
    probe = table.probe(np.asarray([0, 1]))
    request = Request("0", 1, [0], 500, 0.0)
    left = []
    for tokens in (5, 10, 17, 20, 399):
        request.tokens = [0] * (1 + tokens)
        left.append(probe(request))
    assert left == [1, 390, 383, 380, 1]


def test_losses_of_gittins_are_listed() -> None:
    place = {"arrivals": "poisson", "load": 0.9, "predictor": "proxy"}
    rows = [
        {**place, "order": "gittins", "mean": [0.9, 0.88, 0.92]},
        {**place, "order": "sjf", "mean": [0.8, 0.78, 0.82]},
    ]
    assert "| poisson | 0.9 | proxy | sjf |" in orders._losses(rows)
    rows[1]["mean"] = [0.89, 0.85, 0.93]
    assert orders._losses(rows).startswith("In no cell")


def test_missing_data_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["orders", "--data", str(tmp_path)]) == 2
    assert "ssjf_vicuna13b_predictions.csv" in capsys.readouterr().err
    assert main(["orders"]) == 2
    assert "--data DIR" in capsys.readouterr().err


@pytest.mark.slow
def test_the_main_cells_on_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doc_data.answered(tmp_path)
    model = doc_data.model(tmp_path / "model")
    small = (
        "max_model_len=128", "max_num_batched_tokens=16", "token_buckets=[16]", "compilation_cache_dir=",
        "predictor_model=smollm2-length", "max_num_seqs=2",
    )  # fmt: skip
    options = ["--model", str(model), *(f"--set={pair}" for pair in small), "--out", str(tmp_path)]
    options += ["--engine-jobs", "4", "--engine-turns", "2", "--engine-tokens", "12", "--engine-load", "50"]
    assert main(["orders", "--engine", str(tmp_path / "predictor" / "sampled.jsonl"), *options]) == 0
    found = json.loads((tmp_path / "orders.json").read_text())["engine"]
    rows = {(row["order"], row["predictor"]): row for row in found["cells"]}
    assert len(rows) == len(orders_engine.CONTENDERS) and found["mean output"] <= 12 and found["slots"] == 2
    assert found["answers of another length"] == 0
    assert rows["fcfs", "none"]["mean"] == [1, 1, 1] and rows["fcfs", "none"]["predicting"][0] == 0
    assert rows["sjf", "proxy"]["preemptions"][0] == 0 < rows["sjf", "proxy"]["mean"][0]
    assert rows["srpt", "probe"]["probing"][0] == 0, "no probe ships for this model"
    assert "| gittins | oracle |" in (tmp_path / "orders.md").read_text()
    capsys.readouterr()
    file = tmp_path / "predictor" / "sampled.jsonl"
    for wrong, said in (
        ([str(tmp_path / "trained" / "folder" / "answers.jsonl")], "lists of token ids"),
        ([str(file.with_name("none.jsonl"))], "cannot read"),
        ([str(file), "--engine-jobs", "999"], "too few for 999"),
        ([str(file), "--orders", "sjf"], "--orders cannot be"),
    ):
        assert main(["orders", *options, "--engine", *wrong]) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
