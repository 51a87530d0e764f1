"""docs/api.md is what `python docs/make_api.py` writes."""

from __future__ import annotations

import importlib.util

from helpers.paths import ROOT


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.page()
    assert page.count("\n### ") == sum(map(len, module.SECTIONS.values()))
    assert page == module.PAGE.read_text(encoding="utf-8"), "run: python docs/make_api.py"
