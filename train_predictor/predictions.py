"""Predicts held-out answers' lengths as a server does: python -m jaxspec.train_predictor.predictions --config X.yaml

The answers of the config's test part, at arrival by the proxy, by retrieval and by both (the whole answers of the other
parts have been served before), and every --every tokens again by the length probe. Prints how good
each prediction is, and from other answers to the same prompts (--again) how good one could be. --out gets a line of
JSON per answer, for `python -m jaxspec.bench orders --predictions`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.bench.options import count
from jaxspec.bench.table import markdown
from jaxspec.config import ConfigError, parse_overrides
from jaxspec.models.load import ModelLoadError, load_model
from jaxspec.models.load.bert import check_encoder
from jaxspec.progress import progress
from jaxspec.sched.length.distribution import RatioDistribution
from jaxspec.sched.length.length import doubled
from jaxspec.sched.length.reader import RetrievalSettings
from jaxspec.sched.reprediction import smoothed
from jaxspec.train_predictor import command as training
from jaxspec.train_predictor import ending
from jaxspec.train_predictor.answers import check_answers, check_readable, origin_of
from jaxspec.train_predictor.ceiling import ceiling
from jaxspec.train_predictor.config import PredictorConfig
from jaxspec.train_predictor.data import TEST, TRAIN, VALIDATION, part_of_row
from jaxspec.train_predictor.evaluate import evaluate
from jaxspec.train_predictor.probe import SHARES
from jaxspec.train_predictor.report import baseline

if TYPE_CHECKING:
    from jaxspec.draft.distill.data import Row
    from jaxspec.models.length_probe import LengthProbe
    from jaxspec.models.load import LoadedModel

PROG = "jaxspec.train_predictor.predictions"
#: Most tokens of prompt and answer.
LONGEST = 4096
#: Quantiles whose coverage is measured.
QUANTILES = (0.5, 0.8, 0.9)
#: The baseline's row: errors of the training median, accuracy of the most frequent class.
CONSTANT = "a constant"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = training.parser(PROG, __doc__, "configs/predictor/*.yaml")
    parser.add_argument("--predictor", metavar="FILE", help="the proxy (default: the one shipped for the model)")
    parser.add_argument("--probe", metavar="FILE", help="a length probe")
    parser.add_argument("--every", type=count, default=32, metavar="N", help="tokens between probes (default: 32)")
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="JSONL",
        help="other answers to prompts of the test part, collected with another --seed",
    )  # fmt: skip
    parser.add_argument("--out", metavar="JSONL", help="file of the single predictions")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:  # the optional extras
        from jaxspec.models.load.probe_file import load_probe

        config = PredictorConfig.load(args.config, **parse_overrides(args.set))
        check_inputs(args, config)
        target = load_model(config.target)
        probe = None if args.probe is None else load_probe(Path(args.probe), target.config)
        parts = read(config, target)
        limit = limits(config, target, args.again, parts[TEST]) if args.again else ""
        found = at_arrival(config, target, args.predictor, parts)
        left = None if probe is None else while_generating(probe, target, parts[TEST], args.every)
    except KeyboardInterrupt:
        return ending.interrupted(PROG, argv, "nothing was written")
    except ModuleNotFoundError as error:
        return training.fail(PROG, training.lacking(error))
    except (ConfigError, ModelLoadError) as error:
        return training.fail(PROG, str(error))
    print(report(config, parts, found) + limit)
    if left is not None:
        print(f"\n{errors(parts[TEST], found[TEST]['proxy'], left, args.every)}")
    if args.out is not None:
        write(Path(args.out), parts[TEST], found[TEST], left, args.every)
        ending.ended([args.out], f"python -m jaxspec.bench orders --data DATA --predictions {args.out}")
    return 0


def check_inputs(args: argparse.Namespace, config: PredictorConfig) -> None:
    """Raises `ConfigError` and `ModelLoadError` for files and an encoder that are not there, before any is loaded."""
    check_answers("data", config.data, config.target)
    check_readable("--again", args.again)
    check_readable("--probe", [] if args.probe is None else [args.probe])
    check_encoder(config.encoder)
    if args.out is not None:
        training.check_output("--out", args.out)


def read(config: PredictorConfig, target: LoadedModel) -> list[list[Row]]:
    """The answers of each part of the config's data. Raises `ConfigError`."""
    parts: list[list[Row]] = [[], [], []]
    for row in _rows(config.data, target):
        parts[part_of_row(row.prompt, row.group, target.tokenizer, config.validation, config.test)].append(row)
    if not all(parts):
        raise ConfigError("data: too few answers: training, validation and test part must not be empty")
    return parts


def _rows(paths: Sequence[str], target: LoadedModel) -> list[Row]:
    from jaxspec.draft.distill.data import read_rows

    return read_rows(paths, LONGEST, origin_of(target), target.tokenizer.eos_token_ids)


def limits(config: PredictorConfig, target: LoadedModel, again: Sequence[str], rows: Sequence[Row]) -> str:
    """What the best predictor could reach, from `rows` and other answers to the same prompts in the files `again`.

    Raises `ConfigError` if no prompt has another answer.
    """

    def by_prompt(rows: Sequence[Row]) -> dict[Any, Row]:
        """One answer to each prompt at each temperature: then both answers of a pair are drawn alike."""
        return {(*row.prompt, row.temperature): row for row in rows if row.temperature != 0}

    first, second = by_prompt(rows), by_prompt(_rows(again, target))
    pairs = [(row, second[key]) for key, row in first.items() if key in second]
    if sum(row.answer != other.answer for row, other in pairs) < 3:
        raise ConfigError(f"--again: {', '.join(again)} has too few other answers to prompts of the test part")
    length, other = (lengths(side)[0] for side in zip(*pairs, strict=True))
    found = ceiling(length, other, config.classes, np.random.default_rng(config.seed))
    said = [
        f"{name} {best:.3f} ({low:.3f} … {high:.3f}), the other answer as a prediction {twin:.3f}"
        for name, twin, best, low, high in zip(("τ", "accuracy"), *found, strict=True)
    ]
    return f"\n\nThe best that the prompt allows, from {len(pairs)} pairs of answers: {'; '.join(said)}."


def at_arrival(
    config: PredictorConfig, target: LoadedModel, predictor: str | None, parts: Sequence[Sequence[Row]]
) -> dict[int, dict[str, np.ndarray]]:
    """Predicted tokens `[rows]` of the validation and the test part, by each way to predict. Raises as loading does."""
    from jaxspec.predict.blend import BlendedPredictor
    from jaxspec.predict.build import load_encoder, load_proxy
    from jaxspec.predict.index import LengthIndex
    from jaxspec.predict.retrieval import RetrievalPredictor
    from jaxspec.predict.user_text import user_text

    settings = RetrievalSettings()
    proxy, encoder = load_proxy(predictor, config.target), load_encoder(config.encoder)
    strip = user_text(target.tokenizer)

    def made(kind: type[RetrievalPredictor]) -> RetrievalPredictor:
        index = LengthIndex(settings.k, settings.threshold, settings.capacity)
        return kind(proxy, encoder, index, "", user_text=strip)

    retrieval, blend = made(RetrievalPredictor), made(BlendedPredictor)
    texts = {part: [target.tokenizer.decode(row.prompt) for row in rows] for part, rows in enumerate(parts)}
    found: dict[int, dict[str, np.ndarray]] = {VALIDATION: {}, TEST: {}}
    known = [
        (part, text, len(row.answer))
        for part in (TRAIN, VALIDATION) for text, row in zip(texts[part], parts[part], strict=True) if row.ended
    ]  # fmt: skip
    with progress("answers served before", len(known)) as advance:
        for part, text, length in known:
            if part == VALIDATION:  # the blend weighs the proxy by its error where that has not been trained
                blend.predict([text])
            for one in (retrieval, blend):
                one.learn([text], [length])
            advance()
    found[VALIDATION]["proxy"] = proxy.predict(texts[VALIDATION])
    for name, one in (("proxy", proxy), ("retrieval", retrieval), ("blend", blend)):
        found[TEST][name] = np.asarray(one.predict(texts[TEST]), float)
    return found


def while_generating(probe: LengthProbe, target: LoadedModel, rows: Sequence[Row], every: int) -> list[np.ndarray]:
    """For each answer, the tokens that the probe expects after `every`, 2 `every`, … tokens."""
    import jax.numpy as jnp

    from jaxspec.draft.distill.data import each_features, padded_tokens
    from jaxspec.models.length_probe import median_left

    tokens, start, length = padded_tokens(rows, max(len(r.prompt) + len(r.answer) for r in rows), target)
    left = [np.zeros(0)] * len(rows)
    for row, features in each_features(tokens, length, target):
        # At position p the feature is of token p, and token p + 1 is known.
        at = np.arange(start[row] + every - 2, length[row] - 2, every)
        if len(at):
            left[row] = np.asarray(median_left(probe(jnp.asarray(features[at]))))
    return left


def again(left: np.ndarray, every: int, predicted: float) -> list[float]:
    """The predictions of an answer's length: at arrival, and after every `every` tokens."""
    out = [predicted]
    for i, value in enumerate(left.tolist(), 1):
        out.append(smoothed(i * every, value, out[-1]))
    return out


def report(
    config: PredictorConfig, parts: Sequence[Sequence[Row]], found: Mapping[int, Mapping[str, np.ndarray]]
) -> str:
    """Table of the predictions at arrival, and what quantiles by the proxy cover. Where more answers are cut than lie
    above a quantile, it is only known to be long, and covers more."""
    from jaxspec.predict.formulation import class_bounds

    length, capped = lengths(parts[TEST])
    training_length = lengths(parts[TRAIN])[0]
    bounds = np.asarray(class_bounds(training_length, config.classes))
    constant = baseline(training_length, length, capped, bounds)
    median = np.full(len(length), np.median(training_length))
    rows = []
    for name, predicted in {**found[TEST], CONSTANT: median}.items():
        m = constant if name == CONSTANT else evaluate(predicted, length, capped, bounds)
        log_error = float(np.median(np.abs(np.log(predicted / length))[~capped]))
        rows.append([name, m["rows"], m["accuracy"], m["tau"], m["mae"], log_error])
    distribution = RatioDistribution()
    for row, predicted in zip(parts[VALIDATION], found[VALIDATION]["proxy"], strict=True):
        distribution.observe(len(row.answer) / predicted, row.ended)
    covered = []
    for share in QUANTILES:
        ratio = distribution.quantile(share)
        assert ratio is not None
        covered.append(f"{share:.0%} {(length <= ratio * found[TEST]['proxy']).mean():.1%}")
    table = markdown(
        rows, "test part", "answers", ("class accuracy", "{:.3f}"), ("Kendall's τ", "{:.3f}"),
        ("MAE, tokens", "{:.0f}"), ("median |log error|", "{:.2f}"),
    )  # fmt: skip
    cut = f"{capped.mean():.1%} of the test answers were cut"
    return f"{table}\n\nThe proxy's quantiles cover: {', '.join(covered)}; {cut}."


def errors(rows: Sequence[Row], predicted: np.ndarray, left: Sequence[np.ndarray], every: int) -> str:
    """Table of the relative errors of answers that ended, at arrival and while they are generated."""
    length, capped = lengths(rows)
    kept = [i for i in np.flatnonzero(~capped).tolist() if length[i] > every]
    if not kept:
        return f"No answer that ended has more than {every} tokens, so the probe was never asked."
    series = {i: again(left[i], every, float(predicted[i])) for i in kept}
    table = []
    for share in SHARES:
        # Predictions are made at multiples of `every`.
        last = {i: series[i][min(int(share * length[i]) // every, len(series[i]) - 1)] for i in kept}
        both = []
        for values in (last, {i: float(predicted[i]) for i in kept}):
            used = {i: doubled(value, share * length[i]) for i, value in values.items()}  # as the engine uses them
            both.append(float(np.median([abs(value - length[i]) / length[i] for i, value in used.items()])))
        table.append([f"{share:.0%}", *both])
    return markdown(table, "after", ("median relative error, with the probe", "{:.2f}"), ("at arrival only", "{:.2f}"))


def lengths(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens of the answers, whether they were cut)."""
    return np.asarray([len(row.answer) for row in rows]), np.asarray([not row.ended for row in rows])


def write(
    path: Path, rows: Sequence[Row], found: Mapping[str, np.ndarray], left: Sequence[np.ndarray] | None, every: int
) -> None:
    with path.open("w", encoding="utf-8") as file:
        for i, row in enumerate(rows):
            line: dict[str, Any] = {"input_tokens": len(row.prompt), "output_tokens": len(row.answer)}
            line |= {name: round(float(values[i]), 1) for name, values in found.items()}
            if left is not None:
                line |= {"every": every, "left": [round(float(value), 1) for value in left[i]]}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
