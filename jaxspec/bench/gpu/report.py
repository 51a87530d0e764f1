"""The page's tables, and what the numbers say. Only what was measured is said. Does not import JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.bench.gpu import costs
from jaxspec.bench.gpu.plan import BATCH, DRAFTS, REAL, REFERENCE, TINY, cells
from jaxspec.bench.table import markdown, share

NOT_RUN = "Not run on a card yet."
_INTERPRETED = "The kernel was interpreted on a CPU (`--interpret`): no number here says anything about a card."
_MS, _ERROR = "{:.3f}", "{:.1e}"
Results = Mapping[str, Any]


def sections(found: Results) -> dict[str, str]:
    """The tables by the name of their marks. found: `Store`'s results of one model on one device, or empty."""
    return {
        "run": _run(found), "verdict": verdict(found), "rates": _rates(found), "steps": _steps(found),
        "kernel": _kernel(found), "agreement": _agreement(found), "attention": _attention(found),
        "prefill": _prefill(found), "engine": _engine(found),
    }  # fmt: skip


def summary(numbers: Mapping[str, Any]) -> str:
    """A cell's outcome in a few words, for the terminal."""
    for word in ("error", "skipped"):
        if word in numbers:
            return f"{word}: {numbers[word]}"
    forms = {"device_ms": "device {:.3f} ms", "wall_ms": "single {:.3f} ms", "best_per_s": "{:.3g} per s",
             "kernel_rms": "RMS error {:.1e}", "step_ms": "step {:.3f} ms"}  # fmt: skip
    found = {name: numbers[name] for name in forms if numbers.get(name) is not None}
    return ", ".join(forms[name].format(float(np.median(value))) for name, value in found.items()) or "done"


def of_kind(found: Results, kind: str) -> list[dict[str, Any]]:
    """The measured cells of a kind, in the order in which they were first measured."""
    every = found.get("cells", {}).values()
    return [cell for cell in every if cell["kind"] == kind and "error" not in cell and "skipped" not in cell]


def rate(found: Results, what: str) -> float | None:
    """The best measured rate of "copy" (bytes) or "matmul" (operations) per second."""
    return next((cell["best_per_s"] for cell in of_kind(found, "rate") if cell["what"] == what), None)


def roofline_ms(found: Results, cell: Mapping[str, Any]) -> float | None:
    return costs.roofline_ms(_cost(cell), rate(found, "copy"), rate(found, "matmul"))


def _cost(cell: Mapping[str, Any]) -> costs.Cost:
    return costs.Cost(cell["bytes"], cell["flops"])


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _part(found: Results, cell: Mapping[str, Any]) -> float | None:
    """The share of the roofline."""
    least = roofline_ms(found, cell)
    return None if least is None else least / _median(cell["device_ms"])


def _run(found: Results) -> str:
    measured = found.get("cells")
    if not measured:
        return NOT_RUN
    s = found["setting"]
    driver = f", driver {s['driver']}, {s['power']}" if "driver" in s else ""
    times = sorted(cell["time"] for cell in measured.values())
    text = f"{found['model']} on {s['device']}, JAX {s['jax']}{driver}; {times[0]} to {times[-1]}; code {s['code']}."
    earlier = sum((cell["code"], cell["jax"]) != (s["code"], s["jax"]) for cell in measured.values())
    if earlier:
        text += f" {earlier} of {len(measured)} cells were measured with earlier code or another JAX."
    return f"{text} {_INTERPRETED}" if s["backend"] != "gpu" else text


def verdict(found: Results) -> str:
    """A line for each question that the measurements answer, and one for what is missing."""
    if not found.get("cells"):
        return "Nothing was measured, so nothing is known about correctness or speed on a card."
    lines = [*_rightness(found)]
    if found["setting"]["backend"] == "gpu":
        lines += _speed(found)
    else:
        lines.append(_INTERPRETED)
    for word, title in (("error", "Failed"), ("skipped", "Left out")):
        lines += [f"{title}: {key}: {cell[word]}" for key, cell in found["cells"].items() if word in cell]
    missing = [cell.key for cell in _core(found) if cell.key not in found["cells"]]
    lines.append(f"Not measured of the core: {', '.join(missing)}." if missing else "All cells of the core were tried.")
    return "\n".join(f"* {line}" for line in lines)


def _core(found: Results) -> list[Any]:
    sizes = TINY if found["model"] == "tiny" else REAL
    return [cell for cell in cells(sizes, layers=1) if cell.core]


def _rightness(found: Results) -> Iterator[str]:
    kernels = of_kind(found, "kernel")
    right = [cell for cell in kernels if cell["kernel_rms"] is not None and cell["kernel_rms"] <= cell["bound"]]
    if kernels:
        worst = {cell["dtype"]: 0.0 for cell in kernels}
        for cell in kernels:
            worst[cell["dtype"]] = max(worst[cell["dtype"]], _or_infinite(cell["kernel_rms"]))
        largest = ", ".join(f"{error:.1e} in {dtype}" for dtype, error in worst.items())
        yield (
            f"Kernel: {len(right)} of {len(kernels)} cases are within their bounds; largest relative RMS error: "
            f"{largest}."
        )
    else:
        yield "Kernel: its numbers were not compared."
    compared = of_kind(found, "agreement")
    if not compared:
        yield "Tokens: whole decodes were not compared."
    for cell in compared:
        every = cell["pairs"]
        plain = [p for p in every if p["against"] == REFERENCE and not p["path"].endswith((DRAFTS, BATCH))]
        exact = [f"{pair['path']} {share(pair['equal'])}" for pair in plain]
        alone = [pair["equal"] for pair in every if pair["against"] != REFERENCE]
        yield (
            f"Tokens equal to those of {REFERENCE}, of {cell['requests']} × {cell['tokens']} "
            f"({cell['different_tokens']} different ones): {'; '.join(exact)}. Draft trees and batches against "
            f"decoding alone: {share(min(alone))} or more."
        )


def _or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value


def _speed(found: Results) -> Iterator[str]:
    steps = [cell for cell in of_kind(found, "step") if cell["graph"]]
    parts = {_place(cell): part for cell in steps if (part := _part(found, cell)) is not None}
    if parts:
        low, high = min(parts, key=lambda k: parts[k]), max(parts, key=lambda k: parts[k])
        yield (
            f"Roofline: {len(parts)} steps reach {share(parts[low])} ({low}) to {share(parts[high])} ({high}) of what "
            "the measured rates allow."
        )
    else:
        yield "Roofline: no step with a known share."
    plain = {_place(cell): _median(cell["device_ms"]) for cell in of_kind(found, "step") if not cell["graph"]}
    for cell in steps:
        if (without := plain.get(_place(cell))) is not None:
            yield f"CUDA graph, {_place(cell)}: {_median(cell['device_ms']):.3f} ms, without {without:.3f} ms."
    if steps:
        gaps = {_place(cell): _median(cell["wall_ms"]) - _median(cell["device_ms"]) for cell in steps}
        most = max(gaps, key=lambda k: gaps[k])
        yield f"Host: single steps take up to {gaps[most]:.3f} ms longer than steps in a row ({most})."


def _place(cell: Mapping[str, Any]) -> str:
    return f"{cell['batch']} × {cell['nodes']} × {cell['context']}"


def _rates(found: Results) -> str:
    rows = []
    for cell in of_kind(found, "rate"):
        unit, size = ("GB/s", 1e9) if cell["what"] == "copy" else ("TFLOP/s", 1e12)
        rows.append((cell["what"], unit, cell["best_per_s"] / size, cell["median_per_s"] / size))
    return markdown(rows, "", "unit", ("best", "{:,.0f}"), ("median", "{:,.0f}"))


def _steps(found: Results) -> str:
    measured = of_kind(found, "step")
    plain = {_place(cell): _median(cell["device_ms"]) for cell in measured if not cell["graph"]}
    rows = []
    for cell in (cell for cell in measured if cell["graph"]):
        device, wall = _median(cell["device_ms"]), _median(cell["wall_ms"])
        limit = costs.bound(_cost(cell), rate(found, "copy"), rate(found, "matmul"))
        rows.append((
            _place(cell), device, roofline_ms(found, cell), limit, _part(found, cell), wall, wall - device,
            _median(cell["dispatch_ms"]), plain.get(_place(cell)), cell["build_s"],
        ))  # fmt: skip
    return markdown(
        rows, "batch × nodes × context", ("device, ms", _MS), ("roofline, ms", _MS), "bound", ("share", share),
        ("single, ms", _MS), ("host gap, ms", _MS), ("launch, ms", _MS), ("no graph, ms", _MS), ("build, s", "{:.0f}"),
    )  # fmt: skip


def _kernel(found: Results) -> str:
    keys = "case", "dtype", "kernel_rms", "kernel_max", "xla_rms", "bound"
    rows = [tuple(cell.get(key) for key in keys) for cell in of_kind(found, "kernel")]
    return markdown(rows, "case", "dtype", *((label, _ERROR) for label in ("RMS", "largest", "XLA's RMS", "bound")))


def _agreement(found: Results) -> str:
    rows = [
        (pair["path"], pair["against"], pair["equal"], f"{pair['whole']} of {cell['requests']}", pair["first"])
        for cell in of_kind(found, "agreement")
        for pair in cell["pairs"]
    ]
    return markdown(rows, "path", "against", ("equal", share), "requests without a difference", "first difference")


def _attention(found: Results) -> str:
    peak = rate(found, "copy")
    rows = []
    for cell in of_kind(found, "attention"):
        taken = _median(cell["device_ms"])
        speed = cell["bytes"] / (taken / 1e3)
        rows.append((_place(cell), cell["rows"], taken, speed / 1e9, speed / peak if peak else None))
    return markdown(
        rows, "batch × nodes × context", "rows of a tile", ("all layers, ms", _MS), ("KV, GB/s", "{:,.0f}"),
        ("share of the copy", share),
    )  # fmt: skip


def _prefill(found: Results) -> str:
    rows = []
    for cell in of_kind(found, "prefill"):
        taken = _median(cell["device_ms"])
        rows.append((cell["tokens"], taken, roofline_ms(found, cell), _part(found, cell), 1e3 * cell["tokens"] / taken))
    return markdown(
        rows, "tokens", ("device, ms", _MS), ("roofline, ms", _MS), ("share", share), ("tokens/s", "{:,.0f}")
    )


def _engine(found: Results) -> str:
    keys = "draft", "requests", "tokens_per_s", "steps", "step_ms", "host_share", "acceptance"
    rows = [tuple(cell[key] for key in keys) for cell in of_kind(found, "engine")]
    return markdown(
        rows, "drafts", "requests", ("tokens/s", "{:,.0f}"), "steps", ("step, ms", _MS), ("host", share),
        ("accepted drafts", share),
    )  # fmt: skip
