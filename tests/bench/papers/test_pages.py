"""The committed pages hold the tables of the numbers committed next to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench.papers import orders, page, routing_report, write_index
from jaxspec.bench.papers.adaserve import report as adaserve
from jaxspec.bench.papers.alise import report as alise
from jaxspec.bench.papers.laps_sd import report as laps_sd
from jaxspec.bench.papers.spin import report as spin
from jaxspec.bench.papers.ssjf import predictor_report
from jaxspec.bench.papers.ssjf import report as ssjf

RESULTS = Path(__file__).parents[3] / "docs" / "results"
SECTIONS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, str]]] = {
    "adaserve": adaserve.sections, "alise": alise.sections, "laps_sd": laps_sd.sections, "spin": spin.sections,
    "ssjf": ssjf.sections, "predictor": predictor_report.sections, "orders": orders.sections,
    "routing": routing_report.sections,
}  # fmt: skip


@pytest.mark.parametrize("name", SECTIONS)
def test_tables_are_those_of_the_recorded_numbers(name, tmp_path):
    kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    copy = Path(shutil.copy(RESULTS / f"{name}.md", tmp_path))
    page.write(copy, "", SECTIONS[name](kept))
    assert copy.read_text(encoding="utf-8") == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_the_index_has_the_headlines_of_all_papers(tmp_path):
    for path in (*RESULTS.glob("*.json"), RESULTS / "README.md"):
        shutil.copy(path, tmp_path)
    write_index(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == (RESULTS / "README.md").read_text(encoding="utf-8")
