"""The Grafana dashboard shows metrics that the server has."""

from __future__ import annotations

import json
import re

from helpers.fakes import FakeEngine
from helpers.paths import ROOT
from jaxspec.serve.metrics import ServerMetrics

DASHBOARD = json.loads((ROOT / "configs" / "grafana.json").read_text(encoding="utf-8"))


def test_every_metric_exists() -> None:
    engine = FakeEngine(draft=["ngram"])
    shown = ServerMetrics(engine, "fake").render().decode()  # pyright: ignore[reportArgumentType]
    known = {*re.findall(r"^# TYPE (\S+)", shown, re.MULTILINE), *re.findall(r"^(jaxspec:\w+)\{", shown, re.MULTILINE)}
    known |= {f"{name}_bucket" for name in known}  # of histograms without observations
    used = [
        name
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
        for name in re.findall(r"jaxspec:\w+", target["expr"])
    ]
    assert len(used) > 40
    assert not {*used} - known


def test_panels_do_not_overlap() -> None:
    places = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len({*places}) == len(places)
