"""Tables, headlines and figures of LAPS-SD's page, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from jaxspec.bench.estimates import interval
from jaxspec.bench.papers.headlines import Headline, table
from jaxspec.bench.table import PERCENT, TIMES, Form, at, each, markdown, share, shown, walk

#: γ and δ, which the paper does not give. The first gives the lowest latency of those tried, the last errors as in the
#: paper's Fig. 7; with the third, requests become stable as late as in its Fig. 3: see docs/results/laps_sd.md.
STABILITY = ((3, 0.1), (5, 0.05), (10, 0.02), (15, 0.015))
FCFS, LP_SJF, LAS, LAPS_SD = "FCFS", "LP-SJF", "LAS", "LAPS-SD"
LATE, SHRUNK, KNOWN = "LAPS-SD, stable late", "LAPS-SD, shrinkage", "acceptance known"
TYPICAL, MIXED = "LAPS-SD, unknown as typical", "mixed"
TITLES = {"chat": "Chatbot Instruction Prompts", "code": "MBPP", "math": "MiniThinky"}
#: §5.2: LP-SJF is 1.47 times slower; LAPS-SD reduces the mean latency of LAS by 31 %. Abstract: by 39 % on the whole.
PAPER_LP_SJF, PAPER_LAS, PAPER_BOTH = 100 * (1 - 1 / 1.47), 31.0, 39.0
#: The latter if "31 %" means that LAS is 1.31 times slower, as "47 %" does of LP-SJF.
PAPER_LAS_SLOWER = 100 * (1 - 1 / 1.31)
#: Fig. 7: mean errors in per cent. Fig. 2: switches of a request with 500 tokens, in per cent of the time of all else.
PAPER_ERROR = {"chat": 7.63, "code": 11.21, "math": 8.51}
PAPER_SWITCHING = 14.21
#: Estimators of Fig. 7, and the error of the lengths (σ) that they see.
PUBLISHED, WITH_SHRINKAGE, PREDICTED = "published", "with shrinkage", "published, lengths with σ = 0.5"
ESTIMATORS = {PUBLISHED: 0.0, WITH_SHRINKAGE: 0.0, PREDICTED: 0.5}
#: What the map looks for: reductions in per cent against the two.
GOAL = {LP_SJF: 30.0, LAS: 25.0}
PER_CENT, RATIO, SECONDS = interval(PERCENT), interval(TIMES), interval("{:.1f}")
#: Of what is never negative.
ERROR = interval(PERCENT, least=0.0)
#: Why a headline is missed; the page's tables show what changes it.
BECAUSE = {
    LP_SJF: "lengths differ more than acceptance: even known acceptance gains little (map); of the cells with measured "
    "acceptance those with n-gram drafts for HumanEval and arrivals above the capacity reach it",
    "both": "it contains the number against LP-SJF",
}


def headlines(kept: Mapping[str, Any]) -> list[Headline]:
    """§5.2's reductions of the mean latency, the abstract's mean of both, and Fig. 7's errors."""
    found, engine = at(kept, "simulated", "overall", LAPS_SD), at(kept, "engine", "systems", MIXED, LAPS_SD)
    seeds, fewer = (at(kept, "simulated", which) for which in ("seeds", "fewer"))
    out = [
        Headline(
            "mean latency below LP-SJF (1.47× slower)", PAPER_LP_SJF, at(found, LP_SJF), at(engine, LP_SJF, "jct"),
            PERCENT, BECAUSE[LP_SJF], seeds=seeds,
        ),
        Headline("mean latency below LAS", PAPER_LAS, at(found, LAS), at(engine, LAS, "jct"), PERCENT, seeds=seeds),
        Headline(
            "mean latency below LAS, read as 1.31× slower", PAPER_LAS_SLOWER, at(found, LAS), at(engine, LAS, "jct"),
            PERCENT, seeds=seeds,
        ),
        Headline(
            "abstract's 39 %: mean of LP-SJF's 47 % slower and 31 % below LAS", PAPER_BOTH, at(found, "both"), None,
            PERCENT, BECAUSE["both"], seeds=seeds,
        ),
    ]  # fmt: skip
    name, part = best(kept) or ("", None)
    for base, paper in ((LP_SJF, PAPER_LP_SJF), (LAS, PAPER_LAS)):
        out.append(
            Headline(f"below {base}, measured acceptance, trained predictor{name}", paper, at(part, base, "jct"),
                     None, PERCENT, seeds=fewer)
        )  # fmt: skip
    gamma, delta = STABILITY[-1]
    for name, paper in PAPER_ERROR.items():
        ours = at(kept, "simulated", "errors", estimation_key(name, gamma, delta), "error")
        what = f"error of the estimated time, {TITLES[name]}; true lengths, γ = {gamma}, δ = {delta}"
        only = _late(kept, name) if ours else ""
        out.append(Headline(what, paper, ours, None, PERCENT, only=only, at_most=True, seeds=fewer))
    return out


def _late(kept: Mapping[str, Any], name: str) -> str:
    """What the errors of Fig. 7 cost: estimates that few requests live to see, unlike with the settings of Fig. 5."""
    errors = kept["simulated"]["errors"]
    early, late = (errors[estimation_key(name, *pair)] for pair in (STABILITY[0], STABILITY[-1]))
    return (
        f"only {shown(late['perceived'][0], share)} of the requests become stable with these γ and δ; with those of"
        f" Fig. 5 the error is {shown(early['error'][0], PERCENT)}"
    )


def estimation_key(name: str, gamma: int, delta: float, estimator: str = PUBLISHED) -> str:
    """The name of an estimate of Fig. 7."""
    return f"{name} | γ = {gamma}, δ = {delta} | {estimator}"


def best(kept: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The measured setting with the largest reduction against LP-SJF, among those that reach both goals or else among
    all. -> its name, and LAPS-SD's results there."""
    found = at(kept, "simulated", "measured") or {}
    if not found:
        return None

    def rank(key: str) -> tuple[bool, float]:
        own = found[key][LAPS_SD]
        return all(own[base]["jct"][0] >= goal for base, goal in GOAL.items()), own[LP_SJF]["jct"][0]

    key = max(found, key=rank)
    pair, cap, load = key.split(" | ")
    title = f" (best of {len(found)} cells: {pair}, {_cap(cap)}, {arrivals_title(load)})"
    return title, found[key][LAPS_SD]


def arrivals_title(load: str) -> str:
    return "all at once" if load == "None" else f"Poisson, load {load}"


def _cap(cap: str) -> str:
    return "answers to EOS" if cap == "EOS" else f"answers of at most {cap} tokens"


def _goal(base: str) -> Form:
    """A form: per cent with the interval, in bold if the goal is reached."""
    return lambda found: f"**{shown(found, PER_CENT)}**" if found[0] >= GOAL[base] else shown(found, PER_CENT)


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, for the experiments that have been run."""
    out = {"headlines": table(headlines(kept))}
    if kept.get("simulated"):
        most, fewer = (kept["simulated"][name] for name in ("seeds", "fewer"))
        out["seeds"] = f"Seeds: {most} for Fig. 5, {fewer} for all other experiments."
    if kept.get("engine"):
        out["engine"] = _engine(kept["engine"])
    simulated = kept.get("simulated")
    if not simulated:
        return out
    return out | _figures_2_and_3(simulated) | _latency(simulated) | _maps(simulated) | _queues_and_errors(simulated)


def _engine(engine: Mapping[str, Any]) -> str:
    titles = {MIXED: "all three kinds, mixed", **TITLES}
    return markdown(
        (
            [f"{titles[name]}, {engine['requests'][name]} requests", order, own["jct"], own["ttft"]]
            + [at(own, base, metric) for base in (FCFS, LP_SJF, LAS) for metric in ("jct", "ttft")]
            + [at(own, LP_SJF, "throughput")]
            for name, order, own in walk(engine["systems"], 2)
        ),
        "engine", "order", *each(("mean latency, s", "mean TTFT, s"), interval("{:.2f}")),
        *(
            (f"{what} {base}", form) for base in (FCFS, LP_SJF, LAS)
            for what, form in (("latency below", PER_CENT), ("TTFT by that of", RATIO))
        ),
        ("throughput by that of LP-SJF", RATIO),
    )  # fmt: skip


def _figures_2_and_3(simulated: Mapping[str, Any]) -> dict[str, str]:
    by_quantum: dict[str, dict[str, Any]] = {}
    for key, part in simulated["switching"].items():
        quantum, tokens = key.split(" | ")
        by_quantum.setdefault(quantum, {})[tokens] = part[0]
    lengths = list(next(iter(by_quantum.values())))
    paper = ["paper", *(PAPER_SWITCHING if n == "500" else None for n in lengths)]
    rows = [[f"a switch every {q} ms", *(100 * part for part in found.values())] for q, found in by_quantum.items()]
    distance = simulated["settling"]["distance"]
    return {
        "switching": markdown(
            [paper, *rows], "time of switches relative to all else (Fig. 2), by output length", *each(lengths, PERCENT)
        ),
        "settling": markdown(
            [["mean distance", *distance.values()]], "acceptance rate so far, from the last one (Fig. 3), by tokens",
            *each(distance, "{:.3f}"),
        ),
    }  # fmt: skip


def _latency(simulated: Mapping[str, Any]) -> dict[str, str]:
    counts = simulated["counts"]
    paper = {LP_SJF: PAPER_LP_SJF, LAS: PAPER_LAS}
    orders = [name for name in simulated["overall"] if name not in (FCFS, LP_SJF, LAS)]
    rows = [
        [f"{TITLES[name]}, {n} requests, against {base}", paper[base], *(at(found, o, base, "jct") for o in orders)]
        for name, n, found in walk(counts, 2) for base in paper
    ]  # fmt: skip
    rows += [
        [f"mean over all, against {base}", paper[base], *(simulated["overall"][o][base] for o in orders)]
        for base in paper
    ]
    price = [
        [f"{TITLES[name]}, {n} requests", order, own["jct"], own["ttft"], own["switching"],
         *(at(own, base, metric) for base in (LP_SJF, LAS) for metric in ("ttft", "throughput"))]
        for name, points in counts.items() for n, found in list(points.items())[-1:] for order, own in found.items()
    ]  # fmt: skip
    return {
        "latency": markdown(
            rows, "mean latency reduction (Fig. 5)", ("paper", PERCENT), *each(orders, PER_CENT)
        ),
        "price": markdown(
            price, "Fig. 5", "order", *each(("mean latency, s", "mean TTFT, s"), SECONDS), ("switches", ERROR),
            *each((f"{what} by {base}'s" for base in (LP_SJF, LAS) for what in ("TTFT", "throughput")), RATIO),
        ),
        "overall": markdown(
            ([order, *(simulated["overall"][order][what] for what in (LP_SJF, "slower", LAS, "both"))]
             for order in orders),
            "mean over all points of Fig. 5",
            *each(("below LP-SJF", "LP-SJF slower by", "below LAS", "mean of the last two"), PER_CENT),
        ),
        "knees": markdown(
            simulated["knees"].items(), "order",
            ("load at a mean latency of 5 mean execution times", interval("{:.2f}")),
        ),
    }  # fmt: skip


def _maps(simulated: Mapping[str, Any]) -> dict[str, str]:
    out = {}
    for base, order, name in ((LP_SJF, LAPS_SD, "map"), (LAS, LAPS_SD, "map, LAS"), (LP_SJF, KNOWN, "map, known")):
        rows = {
            f"{arrivals_title(load)}, σ = {sigma}": [own[order][base]["jct"] for own in found.values()]
            for load, sigma, found in walk(nested(simulated["map"]), 2)
        }
        spreads = next(iter(walk(nested(simulated["map"]), 2)))[-1]
        out[name] = markdown(
            ([title, *values] for title, values in rows.items()),
            f"mean latency of {order} below {base}, by spread of acceptance", *each(spreads, _goal(base)),
        )  # fmt: skip
    out["loads"] = markdown(
        (
            [arrivals_title(load), order, own["jct"], own["ttft"], *(at(own, base, m) for base in (LP_SJF, LAS)
             for m in ("jct", "ttft", "throughput"))]
            for load, found in simulated["loads"].items() for order, own in found.items()
        ),
        "arrivals", "order", *each(("mean latency, s", "mean TTFT, s"), SECONDS),
        *(
            (f"{what} {base}", form) for base in (LP_SJF, LAS)
            for what, form in (("latency below", PER_CENT), ("TTFT by", RATIO), ("throughput by", RATIO))
        ),
    )  # fmt: skip
    for name, title in (("variations", "changed"), ("measured", "acceptance, answers, arrivals")):
        keys = {key: key for key in simulated[name]}
        if name == "measured":
            keys = {key: f"{pair}, {_cap(cap)}, {arrivals_title(load)}" for key in keys
                    for pair, cap, load in (key.split(" | "),)}  # fmt: skip
        order = [LAPS_SD, KNOWN] if name == "variations" else [LAPS_SD, SHRUNK, KNOWN]
        out[name] = markdown(
            (
                [keys[key], *(at(found, o, base, "jct") for base in (LP_SJF, LAS) for o in order)]
                + [at(found, LAPS_SD, base, metric) for base in (LP_SJF, LAS) for metric in ("ttft", "throughput")]
                for key, found in simulated[name].items()
            ),
            title, *((f"{o} below {base}", _goal(base)) for base in (LP_SJF, LAS) for o in order),
            *each((f"its {what} by {base}'s" for base in (LP_SJF, LAS) for what in ("TTFT", "throughput")), RATIO),
        )  # fmt: skip
    return out


def nested(found: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """The map's points by arrivals, error and spread."""
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for key, value in found.items():
        load, sigma, spread = key.split(" | ")
        out.setdefault(load, {}).setdefault(sigma, {})[spread] = value
    return out


def _queues_and_errors(simulated: Mapping[str, Any]) -> dict[str, str]:
    ks = next(iter(simulated["queues"].values()))["latency"]
    rows = []
    for name, (gamma, delta) in product(TITLES, STABILITY):
        found = [simulated["errors"][estimation_key(name, gamma, delta, estimator)] for estimator in ESTIMATORS]
        rows.append(
            [f"{TITLES[name]}, γ = {gamma}, δ = {delta}", PAPER_ERROR[name], *(f["error"] for f in found),
             found[0]["bias"], *(found[0][what] for what in ("perceived", "stable_after"))]
        )  # fmt: skip
    classes = list(dict.fromkeys(c for found in simulated["errors"].values() for c in found["by_length"]))
    return {
        "queues": markdown(
            (
                [f"{TITLES[name]}, {n} requests", *(e[0] for e in found["latency"].values()), found["best"],
                 found["fewest"], found["most"]]
                for key, found in simulated["queues"].items() for name, n in (key.split(" | "),)
            ),
            "mean latency, s, by number of queues (Fig. 6)", *each(ks, "{:.2f}"), "best",
            *each((f"best below {next(iter(ks))}", f"best below {list(ks)[-1]}"), PER_CENT),
        ),
        "errors": markdown(
            rows, "error of the estimated execution time (Fig. 7)", ("paper", PERCENT),
            *each(ESTIMATORS, ERROR), ("bias", PER_CENT),
            *each(("requests that become stable", "stable after, share of rounds"), interval(share)),
        ),
        "errors by length": markdown(
            (
                [TITLES[name], *(at(found, "by_length", c) for c in classes)]
                for name, found in _best_errors(simulated["errors"])
            ),
            "error by output length", *each((f"{c} tokens" for c in classes), ERROR),
        ),
    }  # fmt: skip


def _best_errors(errors: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    gamma, delta = STABILITY[-1]
    for name in TITLES:
        if found := errors.get(estimation_key(name, gamma, delta)):
            yield name, found
