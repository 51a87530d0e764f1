"""Loading settings: drafter names, overrides, error messages, presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.paths import CONFIGS
from jaxspec.config import ConfigError, EngineConfig, parse_overrides
from jaxspec.sched.slots import ORDERS


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
        ({"draft": ["ngram", "none"]}, r"^draft: none cannot be combined with other drafters "),
        ({"draft": ["none", "ngram"]}, "^draft: none cannot be combined"),
        ({"draft": ""}, "^draft: a drafter's name is empty"),
        ({"draft": 3}, "^draft: "),
        ({"draft": [3]}, r"^draft\.0: "),
        ({"draft_depth": 0}, "^draft_depth: "),
        ({"draft_nodes": -1}, "^draft_nodes: "),
        ({"draft_nodes": 8, "tree": "adaserve"}, "^draft_nodes: only tree: equal_greedy and global_greedy use it"),
        ({"tree": "oak"}, "^tree: .*global_greedy"),
        ({"path": "x"}, "^unknown setting 'path'; valid settings: model, "),
        ({"self": "x"}, "^unknown setting 'self'"),
        ({"max_num_seq": 3}, r"^unknown setting 'max_num_seq'; did you mean max_num_seqs\?$"),
        ({"Temprature": 3, "dratf": "ngram"}, r"'Temprature'; valid settings: .*'dratf'; did you mean draft\?$"),
        ({"adaserve": {"econmic": 1}}, r"'adaserve.econmic'; valid settings: .* \(did you mean adaserve.economic\?\)$"),
        ({"order": "lifo"}, "^order: .*'laps_sd'"),
        ({"predictor": "crystal_ball"}, "^predictor: .*'noisy_oracle'"),
        ({"predictor_model": ""}, "^predictor_model: "),
        ({"retrieval": {"K": 3}}, r"^unknown setting 'retrieval\.K'; valid settings: retrieval\.k, retrieval\.thr"),
        ({"retrieval": {"k": 0}}, r"^retrieval\.k: .*\(got 0\)"),
        ({"retrieval": {"threshold": 0}}, r"^retrieval\.threshold: "),
        ({"retrieval": {"threshold": 1.5}}, r"^retrieval\.threshold: "),
        ({"retrieval": {"capacity": 0}}, r"^retrieval\.capacity: "),
        ({"retrieval": "yes"}, r"^retrieval is a section with the settings retrieval\.k, "),
        ({"batching": "static"}, "^batching: .*'dynamic'"),
        ({"aging_ms": 0}, "^aging_ms: "),
        ({"laps_sd": {"queue": 3}}, r"^unknown setting 'laps_sd\.queue'; valid settings: laps_sd\.queues, laps_sd"),
        ({"laps_sd": {"queues": 0}}, r"^laps_sd\.queues: .*\(got 0\)"),
        ({"laps_sd": 3}, r"^laps_sd is a section with the settings laps_sd\.queues, "),
        ({"laps_sd": {"acceptance": "oracle"}}, "^laps_sd: .*so set draft_tokens, draft_token_ms, verify_ms$"),
        ({"order": "las", "batching": "dynamic"}, "^batching: dynamic .* but order: las preempts$"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig.load(None, **settings)


@pytest.mark.parametrize("preset", sorted(p.name for p in CONFIGS.glob("*.yaml")))
def test_presets_are_valid(preset: str) -> None:
    EngineConfig.load(CONFIGS / preset)


def test_a_section_is_overridden_key_by_key(tmp_path: Path) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("order: laps_sd\nlaps_sd: {queues: 6, window: 9}\n")
    config = EngineConfig.load(preset, **parse_overrides(["laps_sd.queues=3", "laps_sd.growth=4", "max_num_seqs=2"]))
    own = ORDERS.section_of(config)
    assert (own.queues, own.window, own.growth) == (3, 9, 4.0)
    assert ORDERS.section_of(EngineConfig.load(preset, laps_sd={"queues": 2})).window == 9
    assert config.policy.order == "laps_sd" and ORDERS.section_of(config.policy) == own


#: preset -> (order, predictor)
POLICIES = {
    "fcfs": ("fcfs", "none"), "ssjf": ("sjf", "proxy"), "sjf_oracle": ("sjf", "oracle"),
    "pairwise": ("pairwise", "none"), "priority": ("priority", "none"), "las": ("las", "none"),
    "default": ("sjf", "auto"), "lp_sjf": ("sjf", "proxy"), "laps_sd": ("laps_sd", "proxy"),
    "retrieval_sjf": ("sjf", "retrieval"),
}  # fmt: skip


def test_the_presets_of_policies() -> None:
    presets = {name: EngineConfig.load(CONFIGS / f"{name}.yaml") for name in POLICIES}
    assert {name: (c.order, c.predictor) for name, c in presets.items()} == POLICIES
    assert EngineConfig().policy == presets["fcfs"].policy
    # SSJF's presets run without speculation, LAPS-SD and its baselines with it.
    assert [name for name, c in presets.items() if not c.draft] == ["fcfs", "ssjf", "sjf_oracle", "pairwise"]


def test_the_preset_without_speculation() -> None:
    assert EngineConfig.load(CONFIGS / "no_speculation.yaml") == EngineConfig(draft=[])


def test_a_preset_that_is_not_there_is_named_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load("/no/such.yaml")
    assert str(caught.value) == "cannot read config /no/such.yaml: No such file or directory"
