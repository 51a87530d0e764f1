"""What is trained for a model is named after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.paths import CONFIGS
from jaxspec.config import ConfigError
from jaxspec.draft.distill.config import DistillConfig
from jaxspec.train_predictor import collect, probe
from jaxspec.train_predictor.answers import check_answers
from jaxspec.train_predictor.config import PredictorConfig
from jaxspec.train_predictor.names import target_name

PRESETS = (
    (PredictorConfig, CONFIGS / "predictor" / "length.yaml"),
    (DistillConfig, CONFIGS / "distill" / "eagle.yaml"),
)


def test_a_name_is_that_of_the_folder_file_or_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "Qwen3-0.6B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models" / "Qwen3-0.6B")
    names = {
        "smollm2-135m": "smollm2-135m",
        "models/some.gguf": "some",
        "owner/name": "name",
        "owner/name:Q4_K_M": "name-Q4_K_M",
        f"{tmp_path}/models/Qwen3-0.6B/": "Qwen3-0.6B",
        ".": "Qwen3-0.6B",
    }
    assert {target: target_name(target) for target in names} == names


@pytest.mark.parametrize(("schema", "preset"), PRESETS, ids=["predictor", "drafter"])
def test_a_preset_needs_only_the_target(schema: type[PredictorConfig | DistillConfig], preset: Path) -> None:
    config = schema.load(preset, target="path/to/other")
    assert (config.data, config.work) == (["trained/other/answers.jsonl"], "trained/other")
    assert config.out == f"trained/other/other-{preset.stem}.safetensors"
    assert schema.load(preset).out == f"trained/smollm2-135m/smollm2-135m-{preset.stem}.safetensors"
    own = schema.load(preset, target="other", data=["a"], work="b", out="c.safetensors")
    assert (own.data, own.work, own.out) == (["a"], "b", "c.safetensors")


def test_answers_that_have_not_been_collected_say_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = (
        "^data: there is no trained/m/answers.jsonl yet; collect it first: .*collect --model path/m --prompts FILE$"
    )
    with pytest.raises(ConfigError, match=wanted):
        check_answers("data", ["trained/m/answers.jsonl"], "path/m")
    with pytest.raises(ConfigError, match=r"^data: cannot read other\.jsonl: No such file"):
        check_answers("data", ["other.jsonl"], "path/m")
    (tmp_path / "trained" / "m").mkdir(parents=True)
    (tmp_path / "trained" / "m" / "answers.jsonl").touch()
    check_answers("data", ["trained/m/answers.jsonl"], "path/m")


def test_the_probe_and_the_answers_are_where_the_presets_look() -> None:
    args = probe.parse(["--target", "path/to/other"])
    assert (args.data, args.work) == (["trained/other/answers.jsonl"], "trained/other")
    assert args.out == "trained/other/other-probe.safetensors"
    assert collect.parse(["--prompts", "p", "--model", "path/to/other"]).out == args.data[0]
