"""Settings of a deployment, and the configs of Ray Serve that have them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from helpers.paths import ROOT
from jaxspec.config import ConfigError
from jaxspec.deploy.autoscaling import Scaling
from jaxspec.deploy.settings import DeploySettings, HttpSettings, RoutingSettings
from jaxspec.sched.routing import routing_names

CONFIGS = sorted((ROOT / "configs" / "deploy").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_configs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (application,) = yaml.safe_load(file.read_text())["applications"]
    settings = DeploySettings.load(application["args"])
    assert settings.engine_config().predictor == "auto" and settings.routing.policy in routing_names()
    for deployment in application["deployments"]:
        if "autoscaling_config" in deployment:
            policy = deployment["autoscaling_config"]["policy"]
            assert policy["policy_function"] == f"{Scaling.__module__}:{Scaling.__name__}"
            Scaling(**policy["policy_kwargs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rooting": {}}, "unknown setting 'rooting'; valid settings: .*routing"),
        ({"routing": {"patience": 1}}, "did you mean routing.patience_s"),
        ({"routing": {"report_every_s": 0}}, "routing.report_every_s: .*greater than 0"),
        ({"routing": {"health": {"slow_factor": 1.0}}}, "slow_factor must be above 1"),
        ({"engine": {"max_num_seqs": 0}}, "max_num_seqs"),
        (
            {"http": {"otlp_traces_endpoint": "localhost:4318"}},
            "http.otlp_traces_endpoint: .*must be a URL with http://",
        ),
    ],
)
def test_mistakes_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeploySettings.load(arguments).engine_config()


def test_traces_without_the_extra_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    DeploySettings().check_extras()
    settings = DeploySettings.load({"http": {"otlp_traces_endpoint": "http://localhost:4318"}})
    settings.check_extras()
    monkeypatch.delitem(sys.modules, "jaxspec.serve.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    DeploySettings().check_extras()
    with pytest.raises(ConfigError, match=r'^http\.otlp_traces_endpoint: .*"\.\[otel\]"'):
        settings.check_extras()


def test_every_setting_is_on_the_page() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    own, routing, http = (c.model_fields.keys() for c in (DeploySettings, RoutingSettings, HttpSettings))
    names = [*(own - {"routing"}), *http, *(f"routing.{name}" for name in routing)]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize("file", [*CONFIGS[:1], *sorted((ROOT / "configs").glob("*.yaml"))], ids=lambda file: file.stem)
def test_presets_are_found_elsewhere_and_survive_the_way_to_an_actor(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    preset = "configs/default.yaml" if file in CONFIGS else str(file)
    config = DeploySettings.load({"config": preset, "engine": {"max_num_seqs": 7}}).engine_config()
    assert config.max_num_seqs == 7
    assert DeploySettings(engine=config.model_dump()).engine_config() == config
