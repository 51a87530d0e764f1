"""Trains a length probe: python -m jaxspec.train_predictor.probe --target path/to/folder

A probe re-predicts an answer's length from the target's hidden states while it is generated (`length_probe`). Data are
files of `jaxspec.train_predictor.collect`; the target's features are computed once and kept in the folder of --work,
where the trainer of drafters finds them too. Answers that were cut, and those that --longest cuts, count
as longer than what is there. Errors are measured on whole answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.bench.options import count
from jaxspec.config import ConfigError
from jaxspec.models.hazards import negative_log_likelihood
from jaxspec.models.length_probe import ENDS, LengthProbe, median_left
from jaxspec.models.load import ModelLoadError, load_model
from jaxspec.progress import progress
from jaxspec.train_predictor import command as training
from jaxspec.train_predictor import ending
from jaxspec.train_predictor.answers import check_answers
from jaxspec.train_predictor.data import TEST, part_of_row
from jaxspec.train_predictor.names import PROBE, answers_file, trained_file, work_folder
from jaxspec.train_predictor.report import FEW, few

if TYPE_CHECKING:
    from jaxspec.draft.distill.data import Corpus, Row
    from jaxspec.models.load import LoadedModel

PROG = "jaxspec.train_predictor.probe"
#: Distance of the positions of an answer that are trained on; the first is random.
STRIDE = 4
BATCH, LEARNING_RATE, WEIGHT_DECAY = 1024, 1e-3, 0.05
#: Shares of the answer at which the error is measured.
SHARES = (0.0, 0.25, 0.5, 0.75)
#: Share of the test part, and of the validation part, in the presets of `configs/predictor`.
SHARE = 0.1
#: Answers of at most this many tokens are not measured: an error after a share of them means little.
SHORT = 8


class Examples(NamedTuple):
    """Positions of answers.

    features `[N, width]` float16; left `[N]` float32: tokens after the last known one; ended `[N]` bool: the answer
    ends there, else it was cut there. Numpy arrays, and JAX's where they are traced.
    """

    features: Any
    left: Any
    ended: Any


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m", help="the model whose answers they are")
    parser.add_argument(
        "--data", nargs="+", metavar="JSONL", help="files of collect (default: trained/NAME/answers.jsonl)"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="file of the trained probe (default: trained/NAME/NAME-probe.safetensors)"
    )
    parser.add_argument("--work", metavar="DIR", help="folder of features (default: trained/NAME)")
    parser.add_argument(
        "--longest",
        type=count,
        default=384,
        metavar="N",
        help="cut the training answers at N tokens of prompt and answer, and leave out longer prompts (default: 384)",
    )
    parser.add_argument("--width", type=count, default=64, help="hidden units (default: 64)")
    parser.add_argument("--steps", type=count, default=1500, help="training steps (default: 1500)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.data = args.data or [answers_file(args.target)]
    args.out = args.out or trained_file(args.target, PROBE)
    args.work = args.work or work_folder(args.target)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return ending.interrupted(PROG, argv, f"features that are complete are kept in {args.work}")
    except ModuleNotFoundError as error:  # the optional extra `train`
        return training.fail(PROG, training.lacking(error))
    except (ConfigError, ModelLoadError) as error:
        return training.fail(PROG, str(error))


def _run(args: argparse.Namespace) -> int:
    import optax  # noqa: F401 - if it is missing, say so before anything is loaded

    from jaxspec.draft.distill.data import answers_of, corpus_of, lost
    from jaxspec.models.load.probe_file import save_probe

    check_answers("--data", args.data, args.target)
    training.check_folder("--work", args.work)
    training.check_output("--out", args.out)
    target = load_model(args.target)
    longest = min(args.longest, target.config.max_position)
    rows, apart = answers_of(args.data, target), partial(held_out, target)
    data = corpus_of(rows, target, longest, Path(args.work), apart)
    rng = np.random.default_rng(args.seed)
    examples = positions(data, rng)
    usual = float(np.median([len(row.answer) for row in rows if not apart(row)]))
    test = whole_test_part(data, [row for row in rows if apart(row)], target, Path(args.work))
    print(
        f"{target.name}: {len(examples.left)} positions of {int((~data.held_out).sum())} answers, "
        f"{data.ended.mean():.0%} of which end"
    )
    if said := lost(rows, longest, "--longest"):
        print(said, flush=True)
    probe = trained(LengthProbe(data.features.shape[-1], args.width, nnx.Rngs(args.seed)), examples, args.steps, rng)
    for share, own, constant in errors(probe, test, usual):
        print(f"after {share:.0%} of the answer: median relative error {own:.2f} (the training median: {constant:.2f})")
    print(f"measured on {(found := len(measurable(test)))} whole held-out answers")
    if found < FEW:
        print(few("errors", found, "held-out answers"))
    save_probe(probe, target.name, Path(args.out))
    ending.ended([args.out], ending.serve_command(args.target, probe=args.out))
    return 0


def trained(probe: LengthProbe, examples: Examples, steps: int, rng: np.random.Generator) -> LengthProbe:
    """The probe itself, trained on random batches."""
    import optax

    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    optimizer = nnx.Optimizer(probe, optax.adamw(schedule, weight_decay=WEIGHT_DECAY), wrt=nnx.Param)

    @nnx.jit
    def update(probe: LengthProbe, optimizer: nnx.Optimizer, batch: Examples) -> jax.Array:
        def loss(probe: LengthProbe) -> jax.Array:
            return jnp.mean(negative_log_likelihood(probe(batch.features), batch.left, batch.ended, ENDS))

        value, grads = nnx.value_and_grad(loss)(probe)
        optimizer.update(probe, grads)
        return value

    with progress("training steps", steps) as advance:
        for _ in range(steps):
            chosen = rng.integers(len(examples.left), size=BATCH)
            update(probe, optimizer, Examples(*(part[chosen] for part in examples)))
            advance()
    return probe


def held_out_rows(paths: Sequence[str], target: LoadedModel) -> list[Row]:
    """Whole answers in the test part of length predictors, from all files; answers of one token are left out.

    Raises `ConfigError` naming the field `data`.
    """
    from jaxspec.draft.distill.data import answers_of

    return [row for row in answers_of(paths, target) if len(row.answer) > 1 and held_out(target, row)]


def held_out(target: LoadedModel, row: Row) -> bool:
    """Whether a row is in the test part of length predictors: what was learnt can then be measured together."""
    return part_of_row(row.prompt, row.group, target.tokenizer, SHARE, SHARE) == TEST


def positions(data: Corpus, rng: np.random.Generator) -> Examples:
    """Every `STRIDE`-th position of the training answers.

    At position p the feature is of token p and token p + 1 is known; the answer's last token ends it. Raises
    `ConfigError` if no training answer ends, or all are too short.
    """
    features, left, ended = [], [], []
    for i in np.flatnonzero(~data.held_out):
        start, length = int(data.start[i]), int(data.length[i])
        at = np.arange(start - 1 + int(rng.integers(STRIDE)), length - 2, STRIDE)
        if len(at):
            features.append(np.asarray(data.features[i, at]))
            left.append(length - 2 - at)
            ended.append(np.full(len(at), data.ended[i]))
    if not features or not (data.ended & ~data.held_out).any():
        raise ConfigError("--data: the training answers are too short, or all were cut; collect with a higher cap")
    return Examples(np.concatenate(features), np.concatenate(left).astype(np.float32), np.concatenate(ended))


def whole_test_part(data: Corpus, rows: Sequence[Row], target: LoadedModel, folder: Path) -> Corpus:
    """`data`, if it has the held-out answers that can be measured as they are; else a corpus of those whole answers, so
    that long ones are not missing from what is measured. `rows`: the held-out ones, uncut."""
    from jaxspec.draft.distill.data import held_out_corpus

    kept = [row for row in rows if row.ended and len(row.answer) > SHORT]
    if all(len(row.prompt) + len(row.answer) <= data.tokens.shape[1] for row in kept):
        return data
    return held_out_corpus(kept, target, folder)


def measurable(data: Corpus) -> list[int]:
    """The held-out answers that end and are longer than `SHORT`."""
    return np.flatnonzero(data.held_out & data.ended & (data.length - data.start > SHORT)).tolist()


def errors(probe: LengthProbe, data: Corpus, usual: float) -> list[tuple[float, float, float]]:
    """(share of the answer, median relative error of the probe's length, of the length `usual`), on the answers that
    are `measurable`."""
    output, held_out, found = data.length - data.start, measurable(data), []
    for share in SHARES if held_out else ():
        at = np.asarray([data.start[i] - 1 + int(share * (output[i] - 2)) for i in held_out])
        rows = np.stack([np.asarray(data.features[i, p]) for i, p in zip(held_out, at, strict=True)])
        done = at + 2 - data.start[held_out]
        total = done + np.asarray(median_left(probe(jnp.asarray(rows))))
        true = output[held_out]
        constant = np.maximum(usual, done + 1)
        found.append(
            (share, *(float(np.median(np.abs(predicted - true) / true)) for predicted in (total, constant)))
        )  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main())
