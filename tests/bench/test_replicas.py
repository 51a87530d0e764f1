"""`jaxspec.bench simulate --replicas`, as its users call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench.__main__ import main

COMMON = ["--num-requests", "12", "--output-tokens", "20:0.5", "--cost", "llama-7b-l20", "--set", "max_num_seqs=4"]


def compare(tmp_path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    assert main(["simulate", *options, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_policies_are_compared_on_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["round_robin", "power_of_two", "least_loaded", "prefix_aware", "predicted"]
    options = ["--request-rate", "8", "--slo-ttft-ms", "300", "--set", "predictor=oracle"]
    found = compare(tmp_path, *COMMON, *options, "--replicas", "3", "--routing", ",".join(policies))
    assert list(found["policies"]) == policies
    for name, report in found["policies"].items():
        assert (report["completed"], report["extra"]["replicas"], report["extra"]["routing"]) == (36, 3, name)
        assert report["output_tokens"] == found["policies"]["round_robin"]["output_tokens"]
        assert report["extra"]["decisions_per_s"] > 0 and report["extra"]["imbalance"] >= 1
        assert 0 < report["slo_attainment"] <= 1
    said = capsys.readouterr().out
    assert all(name[:5] in said for name in policies) and "simulated" in said


def test_the_load_grows_with_the_replicas(tmp_path: Path) -> None:
    options = [*COMMON, "--request-rate", "8", "--routing", "round_robin"]
    two, four = (compare(tmp_path, *options, "--replicas", n)["policies"]["round_robin"] for n in ("2", "4"))
    assert four["completed"] == 2 * two["completed"]
    last = [max(sample["start"] for sample in one["samples"]) for one in (two, four)]
    assert 0.4 < last[0] / last[1] < 2.5
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},9,3\n" for i in range(9)))
    traced = compare(tmp_path, "--trace", str(tmp_path / "t.csv"), "--replicas", "4")
    assert max(sample["start"] for sample in traced["policies"]["predicted"]["samples"]) == 2.0


def test_one_replica_is_the_plain_simulation(tmp_path: Path) -> None:
    options = [*COMMON, "--request-rate", "8", "--draft-length", "2", "--set", "predictor=noisy_oracle"]
    plain = compare(tmp_path, *options)
    one = compare(tmp_path, *options, "--replicas", "1")["policies"]["predicted"]
    assert one["samples"] == plain["samples"] and one["acceptance_rate"] == plain["acceptance_rate"] > 0


def test_prefixes_are_shared(tmp_path: Path) -> None:
    options = [*COMMON, "--request-rate", "8", "--shared-prefixes", "3:128"]
    plain = compare(tmp_path, *options)
    assert plain["input_tokens"] == 12 * (64 + 128) and plain["extra"]["prefix_hit_share"] > 0.3
    found = compare(tmp_path, *options, "--replicas", "3", "--routing", "round_robin,predicted")["policies"]
    hits = {name: report["extra"]["prefix_hit_share"] for name, report in found.items()}
    assert 0 < hits["round_robin"] <= hits["predicted"]
    rows = [{"timestamp": 100 * i, "input_length": 600, "output_length": 3, "hash_ids": [7, i]} for i in range(20)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    traced = compare(tmp_path, "--trace", str(tmp_path / "t.jsonl"), "--set", "max_num_seqs=4")
    assert traced["input_tokens"] == 12_000 and 0.7 < traced["extra"]["prefix_hit_share"] < 512 / 600


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--routing", "predicted"], "--routing needs --replicas"),
        (["--replicas", "2", "--set", "draft=ngram"], "drafters are not simulated with --replicas"),
        (["--replicas", "2", "--plot", "x.png"], "--plot shows one run"),
        (["--trace", "BLOCKS", "--shared-prefixes", "2:8"], "the trace says already"),
        (["--trace", "WRONG"], "has no timestamp"),
    ],
)
def test_errors_are_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [1]}
    (tmp_path / "blocks.jsonl").write_text(json.dumps(row))
    (tmp_path / "wrong.jsonl").write_text("{}")
    paths = {"BLOCKS": str(tmp_path / "blocks.jsonl"), "WRONG": str(tmp_path / "wrong.jsonl")}
    given = [paths.get(option, option) for option in options]
    assert main(["simulate", *([] if "--trace" in given else ["--burst"]), *given]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err and "\n" not in err


@pytest.mark.parametrize("option", [["--routing", "best"], ["--routing", ""], ["--shared-prefixes", "3"]])
def test_unknown_names_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--burst", "--replicas", "2", *option])
    assert option[0] in capsys.readouterr().err


def test_a_policy_without_predictions_says_so(tmp_path: Path) -> None:
    found = compare(tmp_path, *COMMON, "--burst", "--replicas", "2", "--routing", "round_robin,predicted")
    assert [note.partition(":")[0] for note in found["notes"]] == ["lengths", "routing"]
