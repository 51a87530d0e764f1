"""Compares length predictors: SSJF's formulations (Table 2), trained on the same data for the same number of steps.

Each is trained as `python -m jaxspec.train_predictor` does, saved, loaded, and run on the prompts of the test split. An
interrupted run continues when started again. The gain for a scheduler is simulated as in `bench paper ssjf` without
batching: jobs of the test split's lengths, shortest predicted job first against FCFS. Numbers are kept in
OUT/predictor.json, tables are written into OUT/predictor.md between the marks there.

With --retrieval a trained predictor is compared with retrieval (ALISE's Table 2), one request at a time: on the test
split after the training split has been served, and on repeating prompts after 1,000 such requests.

With --engine the predictor is measured on the real engine: SSJF with it, against FCFS and SJF with known lengths.
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
from jaxspec.bench.papers.ssjf.cases import RATE, Case, Data, serve
from jaxspec.bench.papers.variants import Variants
from jaxspec.progress import progress
from jaxspec.sched.sim.workload import Lengths

if TYPE_CHECKING:
    from jaxspec.models.load.bert import LoadedEncoder
    from jaxspec.predict.proxy import ProxyPredictor
    from jaxspec.train_predictor.config import PredictorConfig
    from jaxspec.train_predictor.data import Corpus

#: Prompts on which the prediction latency is measured.
TIMED = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config = "training config, e.g. configs/predictor/*.yaml"
    parser.add_argument("--config", required=True, metavar="YAML", help=config)
    override = "override a config value; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=override)
    names = list(predictor_page.SSJF_TABLE_2)
    parser.add_argument(
        "--formulations", nargs="+", choices=names, default=names, metavar="NAME", help="formulations (default: all)"
    )
    options.add_numbers(parser, ("--repeats N", ssjf.SEEDS, "repetitions of each simulated load"))
    compared = "compare this predictor with retrieval instead (ALISE's Table 2; default: the shipped one)"
    parser.add_argument("--retrieval", nargs="?", const="", metavar="FILE", help=compared)
    parser.add_argument("--seed", type=int, default=0, help="seed of --retrieval's repeating prompts and of --engine")
    engine = parser.add_argument_group("serving")
    engine.add_argument(
        "--engine", nargs="?", const="", metavar="FILE", help="serve with this predictor (default: the shipped one)"
    )
    engine.add_argument(
        "--prompts", nargs="+", default=[], metavar="JSONL", help="prompt files; prompts of the test split are served"
    )
    options.add_numbers(
        engine,
        ("--jobs N", 32, "requests per turn"),
        ("--turns N", 5, "turns of each order"),
        ("--max-tokens N", 256, "output cap in tokens"),
        ("--request-rate R", 20.0, "requests/s"),
    )
    modes = list(predictor_serving.MODES)
    engine.add_argument(
        "--modes", nargs="+", choices=modes, default=modes, metavar="MODE", help="batching modes (default: all)"
    )
    parser.add_argument("--out", default="docs/results", metavar="DIR", help="output folder (default: docs/results)")
    parser.add_argument("--json", metavar="FILE", help="write a copy of all numbers to this file")


def run(args: argparse.Namespace) -> int:
    """Run the chosen comparison and write the page. Raises `BenchError` if a model or dependency is missing."""
    from jaxspec.config import ConfigError
    from jaxspec.models.load import ModelLoadError

    Path(args.out).mkdir(parents=True, exist_ok=True)
    try:
        kind, numbers = measurements(args)
    except (ConfigError, ModelLoadError) as error:
        raise BenchError(str(error)) from None
    kept = page.publish(args, "predictor", "Length predictors", kind, numbers, predictor_page.sections)
    if kind == "ablation":
        predictor_page.draw(Path(args.out) / "predictor.png", kept["ablation"]["formulations"])
    return 0


def measurements(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """(kind, numbers) of the comparison that the options select."""
    if args.retrieval is not None:
        return "retrieval", retrieval(args)
    if args.engine is None:
        return "ablation", ablation(args)
    from jaxspec.config import parse_overrides
    from jaxspec.train_predictor.config import PredictorConfig

    if not args.prompts:
        raise BenchError("--prompts: --engine needs prompt files")
    config = PredictorConfig.load(args.config, **parse_overrides(args.set))
    work = predictor_serving.Workload(args.prompts, args.jobs, args.max_tokens, args.request_rate, args.turns)
    return "engine", predictor_serving.measure(config, args.engine or None, work, args.modes, args.seed)


def prepared(args: argparse.Namespace) -> tuple[PredictorConfig, LoadedEncoder, Corpus]:
    """Load the config, encoder and data that the options name. Raises `ConfigError` and `ModelLoadError`."""
    from jaxspec.config import parse_overrides
    from jaxspec.train_predictor.config import PredictorConfig
    from jaxspec.train_predictor.data import prepare

    config = PredictorConfig.load(args.config, **parse_overrides(args.set))
    loaded, data = prepare(config)
    print(data, flush=True)
    return config, loaded, data


def ablation(args: argparse.Namespace) -> dict[str, Any]:
    """Train and measure each selected formulation. Raises as `prepared` does, and `ModuleNotFoundError`."""
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
    return {
        "settings": settings, "data": str(data), "bounds": bounds.tolist(), "formulations": found,
        "baselines": baselines(data, bounds),
    }  # fmt: skip


def baselines(data: Corpus, bounds: np.ndarray) -> dict[str, Any]:
    """Baselines on the test split that do not read the prompt: the training split's median length, which every
    predictor must beat; and the length of another answer to the same prompt, if the data has one, which shows how far a
    prompt determines its answer's length."""
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
        answer, other = np.asarray(twins).T
        found = evaluate(data.length[other].astype(float), data.length[answer], data.capped[answer], bounds)
        out["another answer to the same prompt"] = rounded(found)
    return out


def retrieval(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the proxy alone with retrieval in front of it, and with both blended. Raises as `ablation` does."""
    from jaxspec.models.load import load_model
    from jaxspec.predict.blend import BlendedPredictor
    from jaxspec.predict.build import load_encoder, load_proxy
    from jaxspec.predict.index import LengthIndex
    from jaxspec.predict.retrieval import RetrievalPredictor
    from jaxspec.predict.user_text import user_text
    from jaxspec.sched.length.reader import RetrievalSettings
    from jaxspec.train_predictor.data import TEST, TRAIN

    config, _, data = prepared(args)
    proxy, settings = load_proxy(args.retrieval or None, config.target), RetrievalSettings()
    train, test = data.rows(TRAIN), data.rows(TEST)
    whole = train[~data.capped[train]]  # the true length of a truncated answer is unknown
    few = alise_predictors.repeating(test, np.random.default_rng(args.seed))
    if data.capped[test].all() or data.capped[few[alise_predictors.SERVED :]].all():
        raise BenchError("data: every answer of the test part was cut, so no error is known; collect with a higher cap")
    encoder, strip = load_encoder(settings.encoder), user_text(load_model(config.target).tokenizer)
    found: dict[str, Any] = {}
    for workload, before, rows, uncounted in (
        ("new prompts", whole, test, 0),
        ("repeating prompts", train[:0], few, alise_predictors.SERVED),
    ):
        predictors: dict[str, Any] = {"proxy": proxy}
        for name, kind in (("retrieval", RetrievalPredictor), ("blend", BlendedPredictor)):
            index = LengthIndex(settings.k, settings.threshold, settings.capacity)
            predictors[name] = kind(proxy, encoder, index, "", user_text=strip)
        for one in predictors.values():
            one.warm_up()
        with progress(f"{workload}: served before", len(before)) as advance:
            for row in before:
                for name in ("retrieval", "blend"):
                    predictors[name].learn([data.texts[row]], [int(data.length[row])])
                advance()
        texts = [data.texts[row] for row in rows]
        found[workload] = alise_predictors.compare(predictors, texts, data.length[rows], data.capped[rows], uncounted)
        found[workload]["retrieval"]["share found"] = predictors["retrieval"].found / len(rows)
    return {"settings": settings.model_dump(), "data": str(data), **found}


def measure(path: Path, data: Corpus, bounds: np.ndarray, repeats: int) -> dict[str, Any]:
    """Accuracy of the predictor at `path` on the test split, its latency and size, and its gain for a scheduler."""
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
        **rounded(found), "jct_reduction": reduction, "throughput": throughput,
        "latency_ms": latency(predictor, texts[:TIMED]), "megabytes": path.stat().st_size / 1e6,
    }  # fmt: skip


def latency(predictor: ProxyPredictor, texts: Sequence[str]) -> dict[str, float]:
    """Milliseconds of single predictions, tokenising included."""
    times = predictor_serving.milliseconds(lambda text: predictor.predict([text]), texts)
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    return {"mean": float(np.mean(times)), "p50": p50, "p99": p99}


def worth(predicted: np.ndarray, length: np.ndarray, repeats: int, seed: int = 0) -> tuple[float, float]:
    """(JCT reduction in per cent, throughput ratio) relative to FCFS, simulated at SSJF's rates, one job at a time.

    predicted, length `[rows]`: tokens; the length of a capped answer is what was generated.
    """
    tables = {
        order: Lengths(np.full(len(length), 32), length.astype(int), np.maximum(guess, 1))
        for order, guess in ((ssjf_page.FCFS, np.full(len(length), np.nan)), (ssjf_page.CLASSES, predicted))
    }
    data = Data(ssjf.ORDERS, tables, "", Variants())
    seeds = range(seed, seed + repeats)
    run = [Case(order, order, RATE, rate, "none", one) for order in tables for rate in ssjf.RATES for one in seeds]
    gains = ssjf.summary(run, {case: serve(data, case) for case in run})[ssjf_page.CLASSES]
    reduction, throughput = gains["jct"], gains["quarter"]
    assert reduction is not None and throughput is not None
    return reduction.mean, throughput.mean
