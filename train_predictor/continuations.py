"""How well lengths can be known while answers are generated: python -m jaxspec.train_predictor.continuations

Each of some held-out answers is continued several times, from given shares of it on, with other seeds. The median of
the continuations' lengths stands for the best prediction there, which knows the model and everything that has been
generated. Its error estimates what a length probe could reach; with few continuations it is somewhat too large.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxspec.bench.options import count
from jaxspec.bench.record import drive
from jaxspec.bench.table import UNKNOWN, markdown
from jaxspec.config import ConfigError, parse_overrides
from jaxspec.draft.distill.data import Row
from jaxspec.errors import explained
from jaxspec.llm import LLM
from jaxspec.models.load import ModelLoadError, load_model
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.train_predictor import command as training
from jaxspec.train_predictor import ending
from jaxspec.train_predictor.answers import check_answers
from jaxspec.train_predictor.ceiling import INTERVAL, REPEATS
from jaxspec.train_predictor.conversations import stable_hash
from jaxspec.train_predictor.names import answers_file
from jaxspec.train_predictor.probe import held_out_rows

PROG = "jaxspec.train_predictor.continuations"
#: Answers of at most this many tokens are left out: their relative errors say little.
SHORT = 32


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m", help="the model whose answers they are")
    parser.add_argument(
        "--data", nargs="+", metavar="JSONL", help="files of collect (default: trained/NAME/answers.jsonl)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an engine setting; repeatable")
    parser.add_argument(
        "--shares", type=_share, nargs="+", default=[0.0, 0.25, 0.5], help="of the answer (default: 0 0.25 0.5)"
    )
    parser.add_argument("--each", type=count, default=8, metavar="N", help="continuations of an answer (default: 8)")
    parser.add_argument("--limit", type=count, default=100, metavar="N", help="answers (default: 100)")
    parser.add_argument("--max-tokens", type=count, default=2048, help="cap of an answer, as theirs (default: 2048)")
    parser.add_argument("--seed", type=int, default=1, help="another one than the answers' (default: 1)")
    parser.add_argument("--out", metavar="JSONL", help="file of the lengths")
    args = parser.parse_args(argv)
    args.data = args.data or [answers_file(args.target)]
    return args


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        check_answers("--data", args.data, args.target)
        if args.out is not None:
            training.check_output("--out", args.out)
        target = load_model(args.target)
        kept = [
            row for row in held_out_rows(args.data, target)
            if row.ended and SHORT < len(row.answer) < args.max_tokens and row.temperature
        ][: args.limit]  # fmt: skip
        if not kept:
            raise ConfigError(f"--data: no sampled answers of the test part that end after {SHORT} tokens")
        room = {"draft": (), "max_num_seqs": 64, "max_queued_requests": len(kept) * args.each}
        with LLM(target, **{**room, **parse_overrides(args.set)}) as llm:
            found = {share: continued(llm, kept, share, args) for share in args.shares}
    except KeyboardInterrupt:
        return ending.interrupted(PROG, argv, "nothing was written")
    except (ConfigError, ModelLoadError, OSError, ValueError, RuntimeError) as error:
        return training.fail(PROG, explained(error))
    length = np.asarray([len(row.answer) for row in kept])
    print(f"{len(kept)} answers, {args.each} continuations each\n\n{report(length, found, args.seed)}")
    if args.out is not None:
        with Path(args.out).open("w", encoding="utf-8") as file:
            for share, lengths in found.items():
                for true, several in zip(length.tolist(), lengths.tolist(), strict=True):
                    file.write(json.dumps({"share": share, "length": true, "continued": several}) + "\n")
        ending.ended([args.out])
    return 0


def continued(llm: LLM, rows: Sequence[Row], share: float, args: argparse.Namespace) -> np.ndarray:
    """Lengths `[rows, each]` of answers that begin with this share of each row's answer; at most the cap."""
    begun = np.asarray([int(share * len(row.answer)) for row in rows])
    jobs = [(i, j) for i in range(len(rows)) for j in range(args.each)]
    prompts = [[*rows[i].prompt, *rows[i].answer[: begun[i]]] for i, _ in jobs]
    params = [
        SamplingParams(
            temperature=rows[i].temperature or 0.0, max_tokens=int(args.max_tokens - begun[i]),
            seed=stable_hash(args.seed, i, share, j),
        )
        for i, j in jobs
    ]  # fmt: skip
    with progress(f"continued after {share:.0%}", len(jobs)) as advance:
        found = drive(llm.engine, [0.0] * len(jobs), prompts, params, advance)
    return begun[:, None] + np.asarray([m.output_tokens for m in found]).reshape(len(rows), args.each)


def report(length: np.ndarray, found: dict[float, np.ndarray], seed: int) -> str:
    """Table of the best predictor's median relative error after each share, and the ratio to the first one's, with 95 %
    intervals over answers. `length [N]`: the answers' own; `found`: lengths `[N, each]` of continuations."""
    errors = {share: np.abs(np.median(several, 1) - length) / length for share, several in found.items()}
    draws = np.random.default_rng(seed).integers(len(length), size=(REPEATS, len(length)))
    first = next(iter(errors))
    rows = []
    for share, error in errors.items():
        medians, base = (np.median(e[draws], 1) for e in (error, errors[first]))
        known = share != first and np.median(errors[first]) > 0 and base.min() > 0
        ratio = (np.median(error) / np.median(errors[first]), medians / base) if known else None
        rows.append([
            f"{share:.0%}", _quoted(float(np.median(error)), medians), UNKNOWN if ratio is None else _quoted(*ratio)
        ])  # fmt: skip
    return markdown(rows, "after", "median relative error of the continuations' median", f"relative to {first:.0%}")


def _quoted(value: float, repeated: np.ndarray) -> str:
    low, high = np.quantile(repeated, INTERVAL)
    return f"{value:.2f} ({low:.2f} … {high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
