"""Files of one JSON object a line: prompts, answers and conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")


def read(path: str | Path, parse: Callable[[Any], Row], expected: str = '"turns", a list of texts') -> list[Row]:
    """`parse(value)` of every line that is not empty.

    Raises OSError, or ValueError naming a line that is not JSON, that `parse` refuses with a ValueError, or that lacks
    what is `expected`, that is, for which `parse` raises LookupError, TypeError or AttributeError.
    """
    found: list[Row] = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(parse(json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error!s:.300}") from None
        except RecursionError:
            raise ValueError(f"{path}, line {number}: nested too deeply") from None
        except (LookupError, TypeError, AttributeError, OverflowError):
            raise ValueError(f"{path}, line {number}: has no {expected}") from None
    return found
