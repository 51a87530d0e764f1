"""The systems that LAPS-SD's experiments compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.bench.papers.laps_sd.cases import DRAFTS
from jaxspec.bench.papers.laps_sd.report import FCFS, KNOWN, LAPS_SD, LAS, LATE, LP_SJF, SHRUNK, STABILITY, TYPICAL
from jaxspec.bench.papers.presets import Preset
from jaxspec.sched.sim.cost import LLAMA_7B_L20, StepLoad


def stable_at(window: int, tolerance: float) -> dict[str, Any]:
    """γ and δ as `LapsSdSettings` fields."""
    return {"window": window, "tolerance": tolerance}


#: Times of a round as in Eq. 6; each case replaces them by its own.
_ROUND = {
    "draft_tokens": DRAFTS, "draft_token_ms": 1e3 * LLAMA_7B_L20.draft_level,
    "verify_ms": 1e3 * LLAMA_7B_L20.seconds(StepLoad(1 + DRAFTS)),
}  # fmt: skip
_EARLY, _LATE = stable_at(*STABILITY[0]), stable_at(*STABILITY[2])
SYSTEMS: Mapping[str, Preset] = {
    FCFS: Preset("fcfs"),
    LP_SJF: Preset("lp_sjf"),
    LAS: Preset("las"),
    LAPS_SD: Preset("laps_sd").but(laps_sd=_EARLY),
    LATE: Preset("laps_sd").but(laps_sd=_LATE),
    SHRUNK: Preset("laps_sd").but(laps_sd={**_EARLY, "shrinkage": True}),
    TYPICAL: Preset("laps_sd_typical").but(laps_sd=_EARLY),
    KNOWN: Preset("laps_sd").but(laps_sd={**_EARLY, **_ROUND, "acceptance": "oracle"}),
}
#: Systems that see no lengths.
BLIND = frozenset({FCFS, LAS})
#: Systems of the map and the variations, and of the sweep of loads.
COMPARED = LP_SJF, LAS, LAPS_SD, KNOWN
AGAINST = LP_SJF, LAS, LAPS_SD, TYPICAL
