"""Tables and figures of SPIN's simulated experiments, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench import plot
from jaxspec.bench.estimates import interval
from jaxspec.bench.papers.spin.difficulty import BEST_FOR_ALL, SSMS, WORST_FOR_ALL
from jaxspec.bench.papers.spin.fit import PUBLISHED, SHARE
from jaxspec.bench.papers.spin.systems import (
    AS_FITTED,
    CHOICES,
    EPSILON_WRITTEN,
    FLOWING,
    GREEDY,
    LEARNED,
    SPIN,
    UNPACKED,
    UNPIPED,
    WAYS,
)
from jaxspec.bench.papers.spin.times import LLM
from jaxspec.bench.table import TIMES, at, each, markdown, share, walk

TITLES = {"alpaca": "Alpaca", "cp": "CP", "cip": "CIP", "mix": "Mix"}
#: §VI-B1, LLaMA-7B: goodput relative to the baselines.
PAPER_GOODPUT = {
    ("alpaca", SPIN): 2.34, ("cp", UNPACKED): 1.45, ("cp", UNPIPED): 1.81, ("cp", SPIN): 1.99
}  # fmt: skip
#: §VI-B2: accepted tokens per second on Alpaca, LLaMA-7B; LBSS relative to both other methods on CP.
PAPER_CHOICES = {GREEDY: 32.21, EPSILON_WRITTEN: 43.78, LEARNED: 65.31}
PAPER_CP = {LLM: 1.45, "llama-30b": 1.79}
#: §VI-B3, milliseconds on Alpaca with 16 requests; §II-B2.
PAPER_MS, PAPER_SPEEDUP = {"padded": 529.21, "packed": 335.46}, 1.61
SPEED, GAIN, SECONDS = interval("{:.1f}"), interval(TIMES), interval("{:.1f}")


def sections(simulated: Mapping[str, Any]) -> dict[str, str]:
    """Markdown tables by name."""
    out = {
        "fit": facts(simulated), "models": model_table(simulated), "three": three(simulated["three"]),
        "goodput": goodputs({LLM: simulated["goodput"][LLM]}), "selection": selection(simulated["selection"]),
        "verification simulated": verification(simulated), "speedup": speedup(simulated["speedup"]),
        "pipeline simulated": pipeline(simulated["pipeline"]), "loads": loads(simulated["loads"]),
        "variations": variations(simulated["variations"]),
    }  # fmt: skip
    if others := {llm: own for llm, own in simulated["goodput"].items() if llm != LLM}:
        out["other models"] = goodputs(others)
    if settings := simulated["settings"]:
        out["lbss"] = lbss(settings)
    return out


def facts(simulated: Mapping[str, Any]) -> str:
    """The published numbers that the models are fitted to, and their residuals."""
    rows = []
    for data, published in PUBLISHED.items():
        of_data = at(simulated, "goodput", LLM, data) or {}
        choices = at(simulated, "selection", LLM, data) or {}
        found = {
            "68M": at(of_data, "68M", "accepted"), "LBSS (Fig. 10)": at(of_data, UNPACKED, "accepted"),
            "LBSS (Fig. 11)": at(choices, LEARNED, "accepted"), "greedy": at(choices, GREEDY, "accepted"),
            "ε-greedy": at(choices, EPSILON_WRITTEN, "accepted"), "LBSS / baselines": at(of_data, UNPACKED, "by mean"),
            "SPIN w/o pipe. / baselines": at(of_data, UNPIPED, "by mean"),
            "SPIN / baselines": at(of_data, SPIN, "by mean"),
            "LBSS / other methods": at(choices, LEARNED, "gain over both"),
        }  # fmt: skip
        if data == "alpaca":
            found["SPIN / SPIN w/o pipe."] = at(simulated, "variations", AS_FITTED, "SPIN / w/o pipe.")
        for what, value in published.items():
            own = simulated["fit"][data][what]
            off = own - value if what == SHARE else own / value - 1
            rows.append([f"{TITLES[data]}: {what}", value, own, 100 * off, found.get(what)])
    return markdown(
        rows, "published, LLaMA-7B", ("paper", "{:.2f}"), ("fit", "{:.2f}"), ("residual, %", "{:+.0f}"),
        ("simulated", interval("{:.2f}")),
    )  # fmt: skip


def model_table(simulated: Mapping[str, Any]) -> str:
    """Fig. 2, and which draft models are best and worst for all requests."""
    in_order = lambda names: " and ".join(sorted(names, key=SSMS.index))  # noqa: E731
    rows = []
    for data, own in simulated["models"].items():
        points = at(simulated, "goodput", LLM, data)
        by_speed = sorted(SSMS, key=lambda ssm, p=points: -p[ssm]["accepted"][0]) if points else None
        shares = " / ".join(f"{100 * part:.0f}" for part in own["best"])
        rates = " / ".join(f"{rate:.2f}" for rate in own["rates"])
        rows.append([
            TITLES[data], at(PUBLISHED, data, SHARE), shares, rates, BEST_FOR_ALL.get(data),
            by_speed and by_speed[0], by_speed and in_order(by_speed[-2:]),
        ])  # fmt: skip
    return markdown(
        rows, f"({' / '.join(SSMS)})", ("paper: best served with 265M", share), "model: best served, %",
        "model: mean acceptance rates", "paper: best for all", "simulated",
        f"simulated: two worst (paper: {in_order(WORST_FOR_ALL)})",
    )  # fmt: skip


def three(found: Mapping[str, Any]) -> str:
    """Fig. 3."""
    rows = [
        [ssm, found["speed"][ssm], *(own[ssm][key] for own in found["requests"] for key in ("accepted", "latency"))]
        for ssm in SSMS
    ]
    columns = [
        (f"request {i + 1}: {what}", form)
        for i in range(len(found["requests"])) for what, form in (("accepted", share), ("latency, s", "{:.1f}"))
    ]  # fmt: skip
    text = markdown(rows, "Alpaca", ("drafted tokens/s", SPEED), *columns)
    return (
        f"{text}\n\n{found['tokens']} tokens each, served alone. Of {found['draws']} draws of three requests, "
        f"{share(found['differ'][0])} do not have one fastest draft model for all three."
    )


def goodputs(by_llm: Mapping[str, Any]) -> str:
    """Fig. 10."""
    rows = []
    for llm, data, name, own in walk(by_llm, 3):
        if data in TITLES:
            paper = PAPER_GOODPUT.get((data, name)) if llm == LLM else None
            keys = ("by mean", "by best", "by worst", "accepted", "tokens", "ttft")
            rows.append([f"{llm}, {TITLES[data]}", name, paper, *(own[key] for key in keys)])
    return markdown(
        rows, "Fig. 10", "system", ("paper", TIMES), *each(("/ mean", "/ best", "/ worst"), GAIN),
        ("accepted tokens/s", SPEED), ("all tokens/s", SPEED), ("mean TTFT, s", SECONDS),
    )  # fmt: skip


def selection(by_llm: Mapping[str, Any]) -> str:
    """Fig. 11."""
    rows = []
    for llm, data, name, own in walk(by_llm, 3):
        first = llm == LLM and data == "alpaca"
        paper = PAPER_CHOICES.get(name) if first else None
        gain = PAPER_CHOICES[LEARNED] / paper if paper and name != LEARNED else None
        if name == LEARNED and data == "cp":
            gain = PAPER_CP[llm]
        ours = own["gain"] if name != LEARNED else own["gain over both"]
        rows.append(
            [f"{llm}, {TITLES[data]}", name, paper, own["accepted"], gain, ours, own["own gain"], own["tokens"]]
        )
    return markdown(
        rows, "Fig. 11", "draft choice", ("paper: accepted tokens/s", "{:.2f}"), ("simulated", SPEED),
        ("paper: LBSS relative to it", TIMES), ("simulated", GAIN), ("the same, slots' own time", GAIN),
        ("all tokens/s", SPEED),
    )  # fmt: skip


def verification(simulated: Mapping[str, Any]) -> str:
    """Fig. 12."""
    sizes = list(next(iter(simulated["verification"].values()))["gain"])
    rows: list[Sequence[Any]] = [
        [f"{TITLES[data]}, {way}", *(own[way][size]["ms"] for size in sizes), own[way][sizes[-1]]["gigabytes"]]
        for data, own in simulated["verification"].items() for way in WAYS
    ]  # fmt: skip
    gains = [
        [f"{TITLES[data]}, padded / packed", *(own["gain"][size] for size in sizes)]
        for data, own in simulated["verification"].items()
    ]
    columns = each((f"{size} at once" for size in sizes), interval("{:.0f}"))
    times = markdown(rows, "ms per verification", *columns, (f"peak GB of KV, {sizes[-1]}", interval("{:.1f}")))
    return f"{times}\n\n{markdown(gains, 'gain', *each((f'{size} at once' for size in sizes), GAIN))}"


def speedup(found: Mapping[str, Any]) -> str:
    """Fig. 4."""
    rows = [
        [f"{times}, {way}", size, *(own[ssm] for ssm in ("68M", "1.1B"))] for times, way, size, own in walk(found, 3)
    ]
    paper = f"Alpaca, speedup over no drafts (paper: {PAPER_SPEEDUP}× for one request)"
    return markdown(rows, paper, "requests at once", *each(("68M", "1.1B"), GAIN))


def pipeline(found: Mapping[str, Any]) -> str:
    """Fig. 13."""
    rows = [[f"{TITLES[data]}, {crowd} requests, {kind}", *own.values()] for crowd, data, kind, own in walk(found, 3)]
    parts = next(iter(walk(found, 3)))[-1]
    names = ("heuristic" if part == "None" else part for part in parts)
    return markdown(rows, "goodput relative to one micro-batch", *each(names, GAIN))


def loads(found: Mapping[str, Any]) -> str:
    rows = [[rate, name, own["ttft"], own["jct"], own["requests"]] for name, rate, own in walk(found, 2)]
    return markdown(
        sorted(rows, key=lambda row: float(row[0])), "Alpaca, requests/s", "system", ("mean TTFT, s", SECONDS),
        ("mean latency, s", SECONDS), ("requests/s served", interval("{:.2f}")),
    )  # fmt: skip


def variations(found: Mapping[str, Any]) -> str:
    keys = list(next(iter(found.values())))
    return markdown(([what, *own.values()] for what, own in found.items()), "Alpaca, goodput", *each(keys, GAIN))


def lbss(found: Mapping[str, Any]) -> str:
    names = list(next(iter(found.values()), {}))
    rows = [[name, *(own[name][m] for own in found.values() for m in ("tokens", "own"))] for name in names]
    columns = [f"{n} tokens: {m}" for n in found for m in ("all tokens/s", "slots' own time")]
    return markdown(rows, "relative to the oracle", *each(columns, interval("{:.2f}")))


def best_parts(found: Mapping[str, Any]) -> tuple[str, Sequence[float]]:
    """The number of flowing micro-batches with the highest goodput, and its gain; Alpaca, eight requests."""
    own = found["8"]["alpaca"][FLOWING]
    best = max((parts for parts in own if parts != "None"), key=lambda parts: own[parts][0])
    return best, own[best]


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 10, 11 and 13, and the latencies by rate, as PNG files next to the page. Raises `BenchError`."""
    goodput = {d: own for d, own in simulated["goodput"][LLM].items() if d in TITLES}
    for name, by_data in (("goodput", goodput), ("selection", simulated["selection"][LLM])):
        heights = {
            TITLES[data]: {n: own[n]["accepted"][0] for n in own if name == "goodput" or n in CHOICES}
            for data, own in by_data.items()
        }
        plot.bars(out / f"spin_{name}.png", heights, "accepted tokens/s")
    panels: dict[str, dict[str, plot.Curve]] = {}
    for crowd, data, kind, found in walk(simulated["pipeline"], 3):
        curve = {parts: own for parts, own in found.items() if parts != "None"}
        panels.setdefault(f"{TITLES[data]}, {crowd} requests", {})[kind] = curve
    plot.curves(out / "spin_simulated_pipeline.png", panels, "micro-batches", "relative to one micro-batch")
    plot.curves(
        out / "spin_loads.png", {"Alpaca": simulated["loads"]}, "requests/s", "mean TTFT, s", lambda own: own["ttft"]
    )
