"""Settings: what a drafter may be called, and names that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxspec.config import ConfigError, EngineConfig, parse_overrides

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize(
    ("written", "drafters"),
    [
        ("[]", []), ("none", []), ("[none]", []), ("", []), ("ngram", ["ngram"]), ("[ngram]", ["ngram"]),
        ("truncated:6", ["truncated:6"]), ("./none", ["./none"]),
    ],
)  # fmt: skip
def test_drafters_as_they_are_written(written: str, drafters: list[str]) -> None:
    assert EngineConfig.load(**parse_overrides([f"draft={written}"])).draft == drafters


def test_none_switches_a_presets_drafter_off(tmp_path: Path) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("draft: [ngram]\n")
    assert EngineConfig.load(preset).draft == ["ngram"]
    for off in ("none", ["none"], [], ()):
        assert EngineConfig.load(preset, draft=off).draft == []
    assert EngineConfig.load(preset, draft=["truncated:2"]).draft == ["truncated:2"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"draft": ["ngram", "ngram"]}, r"^draft: a drafter is named twice \(got \['ngram', "),
        ({"draft": ["ngram", "none"]}, r"^draft: none cannot stand beside other drafters "),
        ({"draft": ["none", "ngram"]}, "^draft: none cannot stand"),
        ({"draft": ""}, "^draft: a drafter's name is empty"),
        ({"draft": 3}, "^draft: "),
        ({"draft": [3]}, r"^draft\.0: "),
        ({"draft_levels": 0}, "^draft_levels: "),
        ({"draft_nodes": -1}, "^draft_nodes: "),
        ({"tree": "oak"}, "^tree: .*global_greedy"),
        ({"path": "x"}, "^unknown setting 'path'; valid settings: model, "),
        ({"self": "x"}, "^unknown setting 'self'"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig.load(None, **settings)


@pytest.mark.parametrize("preset", sorted(p.name for p in CONFIGS.glob("*.yaml")))
def test_presets_are_valid(preset: str) -> None:
    EngineConfig.load(CONFIGS / preset)


def test_the_preset_without_speculation() -> None:
    assert EngineConfig.load(CONFIGS / "no_speculation.yaml") == EngineConfig(draft=[])
