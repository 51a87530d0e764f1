"""Adds the statistics of several engines up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from jaxspec.engine.metrics import EngineStats
from jaxspec.predict.service import PredictionCounts

#: Shares, which are averaged. All other numbers are added up.
_SHARES = frozenset({"kv_usage", "host_usage", "padded_fraction", "token_padded_fraction"})


def total(stats: Sequence[EngineStats]) -> EngineStats:
    """The sums of all counters, and the means of all shares."""
    if not stats:
        return EngineStats()
    out: dict[str, Any] = {}
    for name in (field.name for field in fields(EngineStats)):
        values = [getattr(s, name) for s in stats]
        if name == "predictions":
            out[name] = PredictionCounts(*(sum(getattr(v, f.name) for v in values) for f in fields(PredictionCounts)))
        elif name == "programs_measured":
            out[name] = all(values)
        elif name == "accepted_by_level":
            out[name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            out[name] = sum(values) / len(values) if name in _SHARES else sum(values)
    return EngineStats(**out)
