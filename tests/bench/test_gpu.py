"""The GPU benchmark: arithmetic, order and budget, what is kept, what the page says, and small runs on the CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.paths import ROOT
from jaxspec.bench.__main__ import main
from jaxspec.bench.gpu import Budget, choose, costs, forests, rates, report, store
from jaxspec.bench.gpu.agreement import equal
from jaxspec.bench.gpu.measures import MEASURES
from jaxspec.bench.gpu.models import MODELS, random_weights
from jaxspec.bench.gpu.plan import MODEL_NAMES, REAL, TINY, Cell, cells
from jaxspec.bench.gpu.serving import NumberTokenizer
from jaxspec.models.decoder import Decoder, device_weights, forward
from jaxspec.models.load.parts import weight_shapes

LLAMA, SMOL = MODELS["llama-3.1-8b"], MODELS["smollm2-135m"]

# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_models_have_the_published_numbers_of_parameters() -> None:
    """The head is counted only for Llama, whose head is not its embedding."""
    sizes = {name: prod(shape) for name, shape in weight_shapes(LLAMA).items()}
    assert sum(sizes.values()) == 8_030_261_248
    sizes = {name: prod(shape) for name, shape in weight_shapes(SMOL).items() if name != "head"}
    assert sum(sizes.values()) == 134_515_008


def test_bytes_and_operations_of_a_step_of_llama() -> None:
    assert costs.weight_bytes(LLAMA, 2) == 15_009_316_864  # 32 × 218.1 M and a head of 525.3 M, two bytes each
    assert costs.position_bytes(LLAMA, 2) == 131_072  # keys and values, 32 layers, 8 heads of 128, two bytes each
    # 16 requests of one token after 2,047 positions: each token attends to 2,048.
    cost = costs.step(LLAMA, 2, 2047, [[0]] * 16, 16)
    assert cost.bytes == 15_009_316_864 + 16 * 2048 * 131_072
    assert cost.flops == 2 * 16 * 7_504_658_432 + 4 * 16 * 2048 * 32 * 32 * 128
    # A tree of a root, two children and a grandchild, one logit row: 11, 12, 12 and 13 keys.
    cost = costs.step(LLAMA, 2, 10, [[0, 1, 2, 1]], 1)
    assert cost.flops == 2 * 4 * 32 * 218_103_808 + 2 * 525_336_576 + 4 * 48 * 4096 * 32


def test_the_roofline_is_the_slower_of_both() -> None:
    cost = costs.Cost(bytes=4_000_000, flops=3_000_000)
    assert costs.roofline_ms(cost, 1e9, 1e9) == pytest.approx(4.0) and costs.bound(cost, 1e9, 1e9) == "memory"
    assert costs.roofline_ms(cost, 1e9, 5e8) == pytest.approx(6.0) and costs.bound(cost, 1e9, 5e8) == "compute"
    assert costs.roofline_ms(cost, 1e9, None) is None and costs.bound(cost, None, 1e9) is None


# --- models and trees -------------------------------------------------------------------------------------------------


def test_random_weights_are_usable_at_any_depth() -> None:
    """Twelve layers: logits are finite and of a usual size, and different tokens get different answers."""
    config = replace(MODELS["tiny"], num_layers=12)
    decoder = Decoder(config, device_weights(config, random_weights(config), "bfloat16"))
    logits = np.asarray(forward(decoder, jnp.arange(40) * 7 % config.vocab_size))
    assert np.isfinite(logits).all() and 2 < logits.std() < 8
    answers = logits.argmax(1)
    assert len(set(answers.tolist())) > 20
    assert (answers == np.arange(40) * 7 % config.vocab_size).mean() < 0.2, "a token's answer is itself"


def test_random_weights_stay_on_the_device() -> None:
    config = MODELS["tiny"]
    weights, again = random_weights(config, 3), random_weights(config, 3)
    assert {name: w.shape for name, w in weights.items()} == weight_shapes(config)
    assert all((weights[name] == again[name]).all() for name in weights)
    assert not (weights["layers.0.qkv"] == random_weights(config, 4)["layers.0.qkv"]).all()
    placed = device_weights(config, weights, "bfloat16")
    assert all(placed[n].unsafe_buffer_pointer() == weights[n].unsafe_buffer_pointer() for n in weights)
    assert device_weights(config, weights, "float32")["head"].dtype == jnp.float32


def test_trees_are_preorders_and_fit_the_logit_rows() -> None:
    assert forests.balanced(7) == [-1, 0, 1, 1, 0, 4, 4]
    assert forests.depths(forests.balanced(7)) == [0, 1, 2, 2, 1, 2, 2]
    assert forests.subtrees(forests.balanced(7)) == [7, 3, 1, 1, 3, 1, 1]
    for count in (1, 2, 5, 8, 64):
        parents = forests.balanced(count)
        assert len(parents) == count and all(parent < i for i, parent in enumerate(parents))
        for most in (count, count // 2 + 1, 1):
            chosen, rows = forests.shaped(count, 1, most)
            assert len(chosen) == count and len(rows) <= most and set(chosen) - {-1} <= set(rows)


# --- order and budget -------------------------------------------------------------------------------------------------


def test_the_core_comes_first_and_every_cell_can_be_measured() -> None:
    assert set(MODEL_NAMES) == MODELS.keys()
    every = cells(REAL, LLAMA.num_layers)
    assert len({cell.key for cell in every}) == len(every)
    assert {cell.kind for cell in every} == MEASURES.keys()
    core = [cell.core for cell in every]
    assert core == sorted(core, reverse=True)
    first = [cell.key for cell in every if cell.core]
    assert first[:3] == ["rate copy", "rate matmul", "kernel 8B's heads, float32"]
    assert first.index("step 16 × 1 × 2048") < first.index("agreement greedy decoding")
    assert first.index("agreement greedy decoding") < first.index("step 64 × 1 × 2048")
    assert sum(key.startswith("step") for key in first) == 6, "five steps, and one of them without the graph"
    steps = [cell.arguments for cell in every if cell.kind == "step"]
    assert max(step["batch"] * step["nodes"] for step in steps) == 1024 and len(steps) == 2 * (27 - 3)


def test_cells_are_chosen_by_the_beginning_of_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    every = cells(REAL, 32)
    assert {cell.kind for cell in choose(every, False, ["rate", "kernel INT8"])} == {"rate", "kernel"}
    assert choose(every, False, None) == [cell for cell in every if cell.core]
    assert choose(every, True, None) == every
    assert main(["gpu", "--model", "tiny", "--interpret", "--cells", "owls", "--out", "/nonexistent"]) == 2
    assert "no cell begins with 'owls'; kinds of cells: rate, kernel, step" in capsys.readouterr().err


def test_no_cell_begins_that_would_not_end_in_time() -> None:
    now = [100.0]
    budget, slow, quick = Budget(1, lambda: now[0]), Cell("step", "a", True, guess=50), Cell("rate", "b", True, guess=5)
    now[0] += 20
    assert not budget.allows(slow) and budget.allows(quick)
    budget.took(slow, 30)
    assert budget.allows(slow), "it is known by now"
    budget.took(slow, 10)
    now[0] += 11
    assert budget.allows(slow), "the last counts: the first one made the weights"
    now[0] += 20
    assert not budget.allows(slow)
    assert Budget(None, lambda: 1e9).allows(slow)


# --- runs -------------------------------------------------------------------------------------------------------------

RUN = ["gpu", "--model", "tiny", "--interpret"]


def results(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "gpu.json").read_text())
    return found["results"][found["shown"]]["cells"]


def table(folder: Path, name: str) -> list[str]:
    text = (folder / "gpu.md").read_text()
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end of {name} -->", text, re.DOTALL)
    assert found
    return found[1].splitlines()


@pytest.mark.slow
def test_two_cells_of_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Page, numbers and their copy are written. What was not measured is named, and nothing is said about a card."""
    copy = tmp_path / "copy.json"
    chosen = ["--cells", "rate copy", "step 2 × 1 × 64"]
    assert main([*RUN, *chosen, "--out", str(tmp_path / "out"), "--json", str(copy)]) == 0
    cell = results(tmp_path / "out")["step 2 × 1 × 64"]
    assert (cell["batch"], cell["layers"], len(cell["device_ms"])) == (2, "gpu", TINY.repeats)
    assert json.loads(copy.read_text()) == json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert table(tmp_path / "out", "steps")[2].startswith("| 2 × 1 × 64 | ")
    verdict = "\n".join(table(tmp_path / "out", "verdict"))
    assert "no number here says anything about a card" in verdict and "Roofline" not in verdict
    assert "Kernel: its numbers were not compared" in verdict and "agreement greedy decoding" in verdict
    assert "3 cells measured, 0 were there" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_errors_of_the_kernel(dtype: str, tmp_path: Path) -> None:
    assert main([*RUN, "--cells", f"kernel one head a group, {dtype}", "--out", str(tmp_path)]) == 0
    (cell,) = results(tmp_path).values()
    assert 0 < cell["kernel_rms"] < cell["bound"] and cell["kernel_rms"] <= cell["kernel_max"]
    assert "Kernel: 1 of 1 cases are within their bounds" in table(tmp_path, "verdict")[0]


@pytest.mark.slow
def test_every_other_kind_of_cell(tmp_path: Path) -> None:
    chosen = ["agreement", "attention 2 × 4 × 64, rows 16", "prefill", "engine truncated", "kernel INT8, float32"]
    assert main([*RUN, "--cells", *chosen, "--out", str(tmp_path)]) == 0
    found = results(tmp_path)
    (agreement,) = (cell for cell in found.values() if cell["kind"] == "agreement")
    shares = {(pair["path"], pair["against"]): pair["equal"] for pair in agreement["pairs"]}
    assert len(shares) == 11 and agreement["different_tokens"] > 4
    assert all(share == 1 for (path, _), share in shares.items() if "float32" in path), shares
    assert found["engine truncated:1"]["acceptance"] is not None and found["engine truncated:1"]["steps"] > 0
    assert len(table(tmp_path, "attention")) == len(table(tmp_path, "prefill")) == len(table(tmp_path, "engine")) == 3


def fake(numbers: dict[str, Any], calls: list[str]) -> dict[str, Any]:
    """`MEASURES` that note their arguments; numbers that are exceptions are raised."""

    def measure(card: Any, **arguments: Any) -> dict[str, Any]:
        calls.append(arguments["what"])
        found = numbers[arguments["what"]]
        if isinstance(found, BaseException):
            raise found
        return found

    return {"rate": measure}


COPY = {"what": "copy", "best_per_s": 4e12, "median_per_s": 3e12}
MATMUL = {"what": "matmul", "best_per_s": 8e14, "median_per_s": 7e14}


def rates_run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str, **numbers: Any
) -> tuple[int, list[str]]:  # fmt: skip
    calls: list[str] = []
    monkeypatch.setattr("jaxspec.bench.gpu.measures.MEASURES", fake(numbers, calls))
    return main([*RUN, "--cells", "rate", "--out", str(folder), *options]), calls


def test_a_run_goes_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates_run(monkeypatch, tmp_path, copy=COPY, matmul=KeyboardInterrupt()) == (130, ["copy", "matmul"])
    assert list(results(tmp_path)) == ["rate copy"] and "| copy | GB/s | 4,000 |" in table(tmp_path, "rates")[2]
    assert rates_run(monkeypatch, tmp_path, copy=COPY, matmul=MATMUL) == (0, ["matmul"])
    assert list(results(tmp_path)) == ["rate copy", "rate matmul"]
    assert rates_run(monkeypatch, tmp_path, "--again", copy=COPY, matmul=MATMUL) == (0, ["copy", "matmul"])


def test_cells_that_failed_or_ended_a_run_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates_run(monkeypatch, tmp_path, copy=KeyboardInterrupt(), matmul=MATMUL) == (130, ["copy"])
    assert rates_run(monkeypatch, tmp_path, copy=ValueError("owls"), matmul=MATMUL) == (1, ["matmul", "copy"])
    assert rates_run(monkeypatch, tmp_path, "--again", copy=COPY, matmul=MATMUL) == (0, ["matmul", "copy"])
    assert rates_run(monkeypatch, tmp_path, "--again", copy=COPY, matmul=MATMUL) == (0, ["copy", "matmul"])


def test_results_of_other_code_are_replaced_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "code", lambda: "old")
    rates_run(monkeypatch, tmp_path, copy=COPY, matmul=MATMUL)
    monkeypatch.setattr(store, "code", lambda: "new")
    half = {**COPY, "best_per_s": 2e12}
    assert rates_run(monkeypatch, tmp_path, copy=half, matmul=KeyboardInterrupt())[0] == 130
    assert [cell["code"] for cell in results(tmp_path).values()] == ["new", "old"]
    assert "1 of 2 cells were measured with earlier code" in table(tmp_path, "run")[0]
    assert "| 2,000 |" in table(tmp_path, "rates")[2]


def test_a_cell_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates_run(monkeypatch, tmp_path, copy=ValueError("out of owls"), matmul=MATMUL) == (1, ["copy", "matmul"])
    assert "* Failed: rate copy: ValueError: out of owls" in table(tmp_path, "verdict")
    assert rates_run(monkeypatch, tmp_path, copy=COPY, matmul=MATMUL) == (0, ["copy"])


def test_cells_without_time_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rates_run(monkeypatch, tmp_path, "--minutes", "1e-6", copy=COPY, matmul=MATMUL) == (0, [])
    assert "Left for lack of time: rate copy, rate matmul" in capsys.readouterr().out
    assert table(tmp_path, "run") == [report.NOT_RUN]


def test_a_strange_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("owls", "[1]", '{"owls": 1}'):
        (tmp_path / "gpu.json").write_text(text)
        assert main([*RUN, "--cells", "rate", "--out", str(tmp_path)]) == 2
        assert "does not hold an earlier run's numbers" in capsys.readouterr().err
        assert (tmp_path / "gpu.json").read_text() == text


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--model", "tiny", "--out", str(tmp_path)]) == 2
    assert "JAX sees no GPU, only the cpu" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_help_does_not_import_jax() -> None:
    code = (
        "import sys\nfrom jaxspec.bench.__main__ import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\nassert 'jax' not in sys.modules"
    )
    for argv in (["--help"], ["gpu", "--help"], ["scheduler", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "usage: python -m jaxspec.bench" in done.stdout, done.stderr


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_committed_page_shows_the_committed_numbers() -> None:
    folder = ROOT / "docs" / "results"
    found = store.read(folder / "gpu.json")
    shown = report.sections(found["results"][found["shown"]] if found else {})
    assert {name: "\n".join(table(folder, name)) for name in shown} == shown


def on_a_card(**more: dict[str, Any]) -> dict[str, Any]:
    stamp = {"code": "c", "jax": "j", "time": "t", "seconds": 1.0}
    setting = {"device": "H200", "backend": "gpu", "jax": "j", "code": "c"}
    given = {"copy": {"kind": "rate", **COPY}, "matmul": {"kind": "rate", **MATMUL}, **more}
    return {"model": "llama-3.1-8b", "setting": setting, "cells": {k: cell | stamp for k, cell in given.items()}}


STEP = {
    "kind": "step", "batch": 1, "nodes": 1, "context": 512, "graph": True, "bytes": int(16e9), "flops": int(1e10),
    "device_ms": [5.0, 6.0, 5.0], "wall_ms": [5.5, 5.5, 7.0], "dispatch_ms": [0.2], "build_s": 30.0,
}  # fmt: skip


def test_the_verdict_compares_steps_with_the_measured_rates() -> None:
    """16 GB at 4 TB/s are 4 ms: 80 % of the roofline. The graph's gain is that of the same step."""
    plain = {**STEP, "graph": False, "device_ms": [9.0]}
    verdict = report.verdict(on_a_card(a=STEP, b=plain))
    assert "Roofline: 1 steps reach 80.0 % (1 × 1 × 512) to 80.0 %" in verdict
    assert "CUDA graph, 1 × 1 × 512: 5.000 ms, without 9.000 ms." in verdict
    assert "up to 0.500 ms longer" in verdict
    assert "Kernel: its numbers were not compared." in verdict and "Tokens: whole decodes were not compared." in verdict
    row = report.sections(on_a_card(a=STEP, b=plain))["steps"].splitlines()[2]
    assert row == "| 1 × 1 × 512 | 5.000 | 4.000 | memory | 80.0 % | 5.500 | 0.500 | 0.200 | 9.000 | 30 |"


def test_the_verdict_claims_nothing_that_was_not_measured() -> None:
    assert report.verdict({}) == "Nothing was measured, so nothing is known about correctness or speed on a card."
    found = on_a_card(a=STEP)
    del found["cells"]["copy"]
    verdict = report.verdict(found)
    assert "Roofline: no step with a known share." in verdict and "CUDA graph" not in verdict and "%" not in verdict
    assert "Not measured of the core: rate copy" in verdict
    assert "Host" not in report.verdict(on_a_card()) and "Failed" not in report.verdict(on_a_card())


def test_a_wrong_kernel_is_called_wrong() -> None:
    right = {"kind": "kernel", "case": "x", "dtype": "float32", "bound": 1e-5, "kernel_rms": 2e-7, "kernel_max": 1e-6}
    wrong, broken = {**right, "kernel_rms": 3e-4}, {**right, "dtype": "bfloat16", "kernel_rms": None}
    line = report.verdict(on_a_card(a=right, b=wrong, c=broken)).splitlines()[0]
    assert line == (
        "* Kernel: 1 of 3 cases are within their bounds; largest relative RMS error: 3.0e-04 in float32, "
        "inf in bfloat16."
    )


def test_summaries_of_cells() -> None:
    assert report.summary(STEP) == "device 5.000 ms, single 5.500 ms"
    assert report.summary(COPY) == "4e+12 per s" and report.summary({"pairs": []}) == "done"
    assert report.summary({"kernel_rms": None}) == "done" and report.summary({"error": "owls"}) == "error: owls"


def test_equal_choices() -> None:
    found = equal([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]])
    assert found == {"equal": 7 / 8, "whole": 1, "first": 2}
    assert equal([[1]], [[1]])["first"] is None


def test_rates_are_amounts_over_times() -> None:
    assert rates._rate(8_000, [2.0, 4.0, 8.0]) == {"best_per_s": 4e6, "median_per_s": 2e6}


def test_the_text_of_a_token_is_its_number() -> None:
    tokenizer = NumberTokenizer(300)
    assert tokenizer.encode(tokenizer.decode([7, 299])) == [7, 299]
    assert b"".join(map(tokenizer.token_bytes, [7, 299])).decode() == tokenizer.decode([7, 299]) == "7 299 "
