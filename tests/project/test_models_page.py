"""The tables of docs/models.md are what `python docs/make_models.py` writes."""

from __future__ import annotations

import importlib.util

from helpers.paths import ROOT


def test_the_tables_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_models", ROOT / "docs" / "make_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == module.PAGE.read_text(encoding="utf-8"), "run: python docs/make_models.py"
