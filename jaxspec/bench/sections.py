"""Pages of results: generated tables between marks in a hand-written Markdown file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def write(path: Path, title: str, sections: Mapping[str, str]) -> None:
    """Write each section between its marks in the file at `path`; sections without marks are appended.

    A missing file is created with the heading `title`.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else f"# {title}\n"
    for name, content in sections.items():
        marked = f"<!-- {name} -->\n{content}\n<!-- end of {name} -->"
        text, found = re.subn(
            rf"<!-- {name} -->.*?<!-- end of {name} -->", lambda _, new=marked: new, text, flags=re.DOTALL
        )
        if not found:
            text = f"{text.rstrip()}\n\n{marked}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
