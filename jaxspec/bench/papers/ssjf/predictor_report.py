"""Tables of the length predictors' page, next to Table 2 of SSJF and of ALISE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench import plot
from jaxspec.bench.papers.ssjf import predictor_serving
from jaxspec.bench.table import PERCENT, TIMES, at, each, markdown

#: SSJF, Table 2, in its order: (accuracy, F1, JCT reduction in per cent, throughput). It has no pairwise one; §3.1
#: says that one reduces JCT by about 3 %.
SSJF_TABLE_2: Mapping[str, tuple[str, Sequence[float | None]]] = {
    "binary": ("binary classes", (None, None, 30.8, 1.59)),
    "ord_mse": ("ordinal classes (MSE)", (0.477, 0.450, 38.0, 2.15)),
    "ord_l1": ("ordinal classes (L1)", (0.580, 0.576, 35.6, 1.99)),
    "cls": ("classes", (0.592, 0.590, 35.8, 1.98)),
    "reg_mse": ("regression (MSE)", (0.601, 0.602, 38.6, 2.19)),
    "reg_l1": ("regression (L1)", (0.615, 0.615, 39.1, 2.21)),
    "pairwise": ("pairwise", (None, None, 3.0, None)),
}
#: ALISE, Table 2, for OPT-2.7B, 6.7B and 13B: (proxy, retrieval).
ALISE_TABLE_2: Mapping[str, tuple[str, Sequence[tuple[float, float]]]] = {
    "accuracy": ("accuracy", ((0.781, 0.821), (0.712, 0.856), (0.634, 0.744))),
    "error_ratio": ("prediction error", ((0.122, 0.057), (0.145, 0.096), (0.178, 0.123))),
    "latency_ms": ("mean prediction latency, ms", ((12.2, 3.92), (11.7, 4.74), (14.8, 4.49))),
    "latency_max_ms": ("max. prediction latency, ms", ()),
}
#: Workloads of the comparison with ALISE's Table 2.
WORKLOADS = ("new prompts", "repeating prompts")
THOUSANDTHS = "{:.3f}"


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, for the experiments that have been run; the paper tables are always there."""
    out = {"SSJF table 2": ssjf_table_2(kept)}
    if ablation := kept.get("ablation"):
        out["predictions"] = predictions(ablation)
    if engine := kept.get("engine"):
        out |= predictor_serving.sections(engine)
    return out | {"ALISE table 2": alise_table_2(kept.get("retrieval"))}


def ssjf_table_2(kept: Mapping[str, Any]) -> str:
    """SSJF's Table 2 with the numbers that `bench predictor` has kept."""
    rows = []
    for name, (title, paper) in SSJF_TABLE_2.items():
        # Accuracy and F1 are over five classes, so the binary predictor has none.
        shares = ("accuracy", "macro_f1") if name != "binary" else ("", "")
        here = [at(kept, "ablation", "formulations", name, key) for key in (*shares, "jct_reduction", "throughput")]
        rows.append([title, *(cell for pair in zip(paper, here, strict=True) for cell in pair)])
    forms = {"accuracy": THOUSANDTHS, "F1": THOUSANDTHS, "JCT reduction": PERCENT, "throughput": TIMES}
    columns = [(label, form) for name, form in forms.items() for label in (f"{name}: paper", "here")]
    return markdown(rows, "SSJF, Table 2", *columns)


def predictions(ablation: Mapping[str, Any]) -> str:
    """Table of all formulations, after the baselines that do not read the prompt."""
    found = ablation["baselines"] | {SSJF_TABLE_2[name][0]: one for name, one in ablation["formulations"].items()}
    shares = {"error_ratio": "error ratio", "accuracy": "accuracy", "tau": "Kendall's τ"}
    shares["capped_reached"] = "capped rows reached"
    return markdown(
        (
            [title, one["rows"], one["mae"], *map(one.get, shares), at(one, "latency_ms", "p50"),
             at(one, "latency_ms", "p99"), one.get("steps")]
            for title, one in found.items()
        ),
        "test split", "rows", ("MAE, tokens", "{:.1f}"), *each(shares.values(), THOUSANDTHS),
        *each(("prediction latency, ms: median", "p99"), "{:.1f}"), "steps",
    )  # fmt: skip


def alise_table_2(found: Mapping[str, Any] | None) -> str:
    """ALISE's Table 2; `found[workload]`: {"proxy": {"accuracy", "error_ratio", "latency_ms"}, "retrieval": same}, and
    "blend" in newer recordings."""
    kinds = ("proxy", "retrieval", *(("blend",) if at(found, WORKLOADS[0], "blend") else ()))
    here = [(workload, kind) for workload in WORKLOADS for kind in kinds]
    rows = [
        [title, *(" / ".join(f"{pair[i]:g}" for pair in paper) or None for i in (0, 1))]
        + [at(found, *where, key) for where in here]
        for key, (title, paper) in ALISE_TABLE_2.items()
    ]
    paper = "proxy: paper, OPT-2.7B / 6.7B / 13B", "retrieval: paper"
    ours = each((f"{kind}: {workload}" for workload, kind in here), THOUSANDTHS)
    return markdown(rows, "ALISE, Table 2", *paper, *ours)


def draw(path: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw Kendall's τ of each formulation on the validation split over training."""
    panels = {
        "all weights, then the head": {
            name: {e["step"]: e["tau"] for e in one["curve"] if e["tau"] is not None} for name, one in found.items()
        }
    }
    plot.curves(path, panels, "steps", "Kendall's τ, validation split")
