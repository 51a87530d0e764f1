"""Length predictors beside each other: SSJF's formulations (Table 2), trained on the same data with one budget.

Each is trained as `python -m jaxspec.train_predictor` does, saved, loaded, and asked for the prompts of the test part.
Broken off and run again, it goes on. What the predictions are worth to a scheduler is simulated as `bench paper ssjf`
does without batching: jobs of the test part's lengths, shortest predicted first against first come, first served. The
numbers are kept in OUT/predictor.json, the tables written into OUT/predictor.md between the marks there.

With --retrieval a predictor trained before is asked for the test part one request at a time, beside ALISE's: once with
the training part served before, and once for prompts that come again and again, after 1,000 such requests.

With --engine the predictor serves: SSJF with it on the real engine, between FCFS and shortest first with lengths known.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.bench import BenchError, options
from jaxspec.bench.papers import page
from jaxspec.bench.papers.alise import predictors as alise_predictors
from jaxspec.bench.papers.ssjf import experiment as ssjf
from jaxspec.bench.papers.ssjf import predictor_report as predictor_page
from jaxspec.bench.papers.ssjf import predictor_serving
from jaxspec.bench.papers.ssjf import report as ssjf_page
from jaxspec.extras import install_hint
from jaxspec.progress import progress
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.workload import Lengths

if TYPE_CHECKING:
    from jaxspec.models.load.bert import LoadedEncoder
    from jaxspec.predict.proxy import ProxyPredictor
    from jaxspec.train_predictor.config import PredictorConfig
    from jaxspec.train_predictor.data import Corpus

#: Prompts that the time of one prediction is measured on.
TIMED = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="YAML", help="a preset, as configs/predictor/*.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="may be given again")
    names = list(predictor_page.SSJF_TABLE_2)
    parser.add_argument("--formulations", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    parser.add_argument(
        "--repeats", type=options.count, default=ssjf.REPEATS, metavar="N", help="of each simulated load"
    )
    parser.add_argument(
        "--retrieval",
        nargs="?",
        const="",
        metavar="FILE",
        help="compare this predictor with retrieval instead (ALISE's Table 2; default: the shipped one)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of --retrieval's repeating prompts, and of --engine")
    engine = parser.add_argument_group("serving")
    engine.add_argument(
        "--engine", nargs="?", const="", metavar="FILE", help="serve with this predictor (default: the shipped one)"
    )
    engine.add_argument("--prompts", nargs="+", default=[], metavar="JSONL", help="those of the test part are served")
    engine.add_argument("--jobs", type=options.count, default=32, metavar="N", help="of a turn (default: 32)")
    engine.add_argument("--turns", type=options.count, default=5, metavar="N", help="of each order (default: 5)")
    modes = list(predictor_serving.MODES)
    engine.add_argument(
        "--modes", nargs="+", choices=modes, default=modes, metavar="MODE", help="batching; default: all"
    )
    engine.add_argument("--max-tokens", type=options.count, default=256, metavar="N", help="default: 256")
    engine.add_argument(
        "--request-rate", type=options.positive, default=20.0, metavar="R", help="a second (default: 20)"
    )
    parser.add_argument("--out", default="docs/results", metavar="DIR", help="default: docs/results")
    parser.add_argument("--json", metavar="FILE", help="another copy of all the numbers")


def run(args: argparse.Namespace) -> int:
    """Raises `BenchError` where nothing can be trained or asked."""
    from jaxspec.config import ConfigError
    from jaxspec.models.load import ModelLoadError

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        kind, numbers = chosen(args)
    except (ConfigError, ModelLoadError) as error:
        raise BenchError(str(error)) from None
    except ModuleNotFoundError as error:
        extra = {"optax": "train", "orbax": "train", "faiss": "retrieval"}.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise BenchError(f"{error.name} is missing: {install_hint(extra)}") from None
    kept = page.keep(out / "predictor.json", kind, numbers, args.json)
    page.write(out / "predictor.md", "Length predictors", predictor_page.sections(kept))
    if kind == "ablation":
        predictor_page.draw(out / "predictor.png", kept["ablation"]["formulations"])
    return 0


def chosen(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """What the options ask for, and its numbers."""
    if args.retrieval is not None:
        return "retrieval", retrieval(args)
    if args.engine is None:
        return "ablation", ablation(args)
    from jaxspec.config import parse_overrides
    from jaxspec.train_predictor.config import PredictorConfig

    if not args.prompts:
        raise BenchError("--prompts: --engine needs files of prompts to serve")
    config = PredictorConfig.load(args.config, **parse_overrides(args.set))
    work = predictor_serving.Workload(args.prompts, args.jobs, args.max_tokens, args.request_rate, args.turns)
    return "engine", predictor_serving.measure(config, args.engine or None, work, args.modes, args.seed)


def prepared(args: argparse.Namespace) -> tuple[PredictorConfig, LoadedEncoder, Corpus]:
    """What the options name. Raises `ConfigError` and `ModelLoadError`."""
    from jaxspec.config import parse_overrides
    from jaxspec.train_predictor.config import PredictorConfig
    from jaxspec.train_predictor.data import prepare

    config = PredictorConfig.load(args.config, **parse_overrides(args.set))
    loaded, data = prepare(config)
    print(data, flush=True)
    return config, loaded, data


def ablation(args: argparse.Namespace) -> dict[str, Any]:
    """Train and measure each formulation of the options. Raises as `prepared` does, and `ModuleNotFoundError`."""
    from jaxspec.predict.formulation import class_bounds
    from jaxspec.train_predictor.data import TRAIN
    from jaxspec.train_predictor.train import Trainer

    config, loaded, data = prepared(args)
    bounds = np.asarray(class_bounds(data.length[data.rows(TRAIN)], config.classes))
    found: dict[str, Any] = {}
    for name in args.formulations:
        print(name, flush=True)
        work = Path(config.work) / f"ablation-{name}"
        trainer = Trainer(config.model_copy(update={"formulation": name}), loaded, data)
        trainer.run(work)
        trainer.predictor(name).save(work / "predictor.safetensors")
        measured = measure(work / "predictor.safetensors", data, bounds, args.repeats)
        found[name] = {**measured, "steps": trainer.at.steps, "curve": trainer.evaluations}
    settings = config.model_dump(exclude={"data", "work", "out", "formulation"})
    known = baselines(data, bounds)
    return {
        "settings": settings, "data": str(data), "bounds": bounds.tolist(), "formulations": found, "baselines": known
    }  # fmt: skip


def baselines(data: Corpus, bounds: np.ndarray) -> dict[str, Any]:
    """What the test part's lengths are predicted by without reading: the training part's median, which is the least
    that a predictor must beat; and the length of another answer to the same prompt, where the data hold one, which
    tells how far a prompt decides its answer's length at all."""
    from jaxspec.train_predictor.data import TEST, TRAIN
    from jaxspec.train_predictor.evaluate import evaluate, rounded

    rows = data.rows(TEST)
    median = np.full(len(rows), np.median(data.length[data.rows(TRAIN)]))
    out: dict[str, Any] = {
        "the training part's median": rounded(evaluate(median, data.length[rows], data.capped[rows], bounds))
    }
    by_text: dict[str, list[int]] = {}
    for row in rows.tolist():
        by_text.setdefault(data.texts[row], []).append(row)
    twins = [(a, b) for same in by_text.values() for a, b in zip(same, [*same[1:], same[0]], strict=True) if a != b]
    if twins:
        own, other = np.asarray(twins).T
        found = evaluate(data.length[other].astype(float), data.length[own], data.capped[own], bounds)
        out["another answer to the same prompt"] = rounded(found)
    return out


def retrieval(args: argparse.Namespace) -> dict[str, Any]:
    """The proxy of the options alone, and behind an index of served requests. Raises as `ablation` does."""
    from jaxspec.predict.build import load_proxy
    from jaxspec.predict.index import LengthIndex
    from jaxspec.predict.retrieval import RetrievalPredictor
    from jaxspec.sched.config import RetrievalSettings
    from jaxspec.train_predictor.data import TEST, TRAIN

    config, _, data = prepared(args)
    proxy, settings = load_proxy(args.retrieval or None, config.target), RetrievalSettings()
    train, test = data.rows(TRAIN), data.rows(TEST)
    whole = train[~data.capped[train]]  # of those that were cut not even the engine knows how long they were
    few = alise_predictors.repeating(test, np.random.default_rng(args.seed))
    found: dict[str, Any] = {}
    for workload, before, rows, uncounted in (
        ("new prompts", whole, test, 0),
        ("repeating prompts", train[:0], few, alise_predictors.SERVED),
    ):
        index = LengthIndex(settings.k, settings.threshold, settings.capacity)
        served = RetrievalPredictor(proxy, index, "")
        proxy.warm_up()
        served.warm_up()
        with progress(f"{workload}: served before", len(before)) as advance:
            for row in before:
                served.learn([data.texts[row]], [int(data.length[row])])
                advance()
        texts = [data.texts[row] for row in rows]
        predictors = {"proxy": proxy, "retrieval": served}
        found[workload] = alise_predictors.compare(predictors, texts, data.length[rows], data.capped[rows], uncounted)
        found[workload]["retrieval"]["share found"] = served.found / len(rows)
    return {"settings": settings.model_dump(), "data": str(data), **found}


def measure(path: Path, data: Corpus, bounds: np.ndarray, repeats: int) -> dict[str, Any]:
    """What the predictor at `path` says of the test part, how long it takes, and what it is worth to a scheduler."""
    from jaxspec.predict.proxy import ProxyPredictor
    from jaxspec.train_predictor.data import TEST
    from jaxspec.train_predictor.evaluate import evaluate, rounded

    predictor = ProxyPredictor.load(path)
    predictor.warm_up()
    rows = data.rows(TEST)
    texts = [data.texts[row] for row in rows]
    predicted = predictor.predict(texts)
    found = evaluate(predicted, data.length[rows], data.capped[rows], bounds)
    reduction, throughput = worth(predicted, data.length[rows], repeats)
    return {
        **rounded(found),
        "jct_reduction": reduction,
        "throughput": throughput,
        "latency_ms": latency(predictor, texts[:TIMED]),
        "megabytes": path.stat().st_size / 1e6,
    }


def latency(predictor: ProxyPredictor, texts: Sequence[str]) -> dict[str, float]:
    """Milliseconds of one prediction at a time, tokenising included."""
    taken = predictor_serving.milliseconds(lambda text: predictor.predict([text]), texts)
    p50, p99 = np.percentile(taken, [50, 99]).tolist()
    return {"mean": float(np.mean(taken)), "p50": p50, "p99": p99}


def worth(predicted: np.ndarray, length: np.ndarray, repeats: int, seed: int = 0) -> tuple[float, float]:
    """(JCT reduction in per cent, throughput as a multiple) against FCFS, simulated at SSJF's rates, one job at a time.

    All arrays `[rows]`; a capped row counts as what was written.
    """
    figure: dict[str, ssjf_page.Curve] = {}
    for order, guess in ((ssjf_page.FCFS, np.full(len(length), np.nan)), (ssjf_page.CLASSES, predicted)):
        table = Lengths(np.full(len(length), 32), length.astype(int), np.maximum(guess, 1))
        figure[order] = ssjf.curve(
            ssjf.ORDERS[order], lambda rate, rng: arrivals.poisson(ssjf.JOBS, rate, rng), ssjf.RATES, "none", 1, table,
            repeats, seed,
        )  # fmt: skip
    reduction, throughput = ssjf_page.gains(figure)
    return float(reduction), float(throughput)
