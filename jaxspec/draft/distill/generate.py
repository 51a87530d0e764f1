"""Generates a target model's answers as training data: `python -m jaxspec.draft.distill.generate --prompts A --out B`.

A prompt file holds one JSON object per line with "turns" (the first is asked) and usually an "id". A line of output is
{"id", "temperature", "prompt_ids", "output_ids", "finished", "model", "model_digest"}. A second run with the same model
resumes where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.config import parse_overrides
from jaxspec.draft.distill.lines import mend, read_lines
from jaxspec.draft.distill.origin import OtherModel, check, origin
from jaxspec.errors import explained
from jaxspec.llm import LLM
from jaxspec.models.load import load_model
from jaxspec.models.load.tokenizer import chat_ids
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.train_predictor import command as training

PROG = "jaxspec.draft.distill.generate"

#: Prompts per write to the output.
BATCH = 128


class Question(NamedTuple):
    """A prompt at one temperature. `id` and `temperature` identify its row of the output."""

    id: str
    temperature: float
    text: str
    seed: int


def count(text: str) -> int:
    """An option's value as an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="JSONL")
    parser.add_argument("--out", required=True, metavar="JSONL", help="output file; appended to")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an engine setting; repeatable")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 0.8], help="one answer each (default: 0 and 0.8)"
    )
    parser.add_argument("--max-tokens", type=count, default=256, help="cap of an answer (default: 256)")
    parser.add_argument("--max-prompt-tokens", type=count, default=512, help="skip longer prompts (default: 512)")
    parser.add_argument("--limit", type=count, help="number of answers, those already given included")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and of sampling (default: 0)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    out = Path(args.out)
    try:
        asked = questions(args.prompts, args.temperature, args.seed)[: args.limit]
        out.parent.mkdir(parents=True, exist_ok=True)
        done = answered(out)
        left = [q for q in asked if (q.id, q.temperature) not in done]
        if not left:
            print(f"{out}: all {len(asked)} questions were already answered")
            return 0
        model = load_model(args.model)
        model_origin = origin(model)
        if done:
            check(done.values(), model_origin, str(out))
        settings: dict[str, Any] = {"draft": (), "enable_prefix_caching": False, "max_num_seqs": 64}
        settings |= parse_overrides(args.set)
        if "model" in settings:
            raise ValueError("--set model: set the model with --model")
        llm = LLM(model, **settings)
    except OtherModel as error:
        return training.fail(PROG, f"--model: {error}; set another --out")
    except (OSError, ValueError) as error:
        return training.fail(PROG, explained(error))
    with llm, out.open("a") as file, progress("answers", len(asked), len(asked) - len(left)) as advance:
        for start in range(0, len(left), BATCH):
            part = left[start : start + BATCH]
            for row in answers(llm, part, args.max_prompt_tokens, args.max_tokens):
                file.write(json.dumps(row | model_origin.fields, separators=(",", ":")) + "\n")
            file.flush()
            for _ in part:
                advance()
    return 0


def questions(paths: Sequence[str], temperatures: Sequence[float], seed: int) -> list[Question]:
    """Every prompt at every temperature, shuffled. A question's sampling seed depends only on its place in this order,
    so a resumed run gives the same answers as an uninterrupted one."""
    asked = [(id, t, text) for path in paths for id, text in read_prompts(Path(path)) for t in temperatures]
    random.Random(seed).shuffle(asked)
    return [Question(*q, seed + i) for i, q in enumerate(asked)]


def read_prompts(path: Path) -> Iterator[tuple[str, str]]:
    """(id, first user turn) of each line. Raises `OSError`, and `ValueError` for a bad line."""
    for i, row in enumerate(read_lines(path)):
        id = str(row.get("id", f"{path.stem}-{i}"))
        match row.get("turns"):
            case [str(text), *_]:
                yield id, text
            case _:
                raise ValueError(f'{path}: prompt {id} has no "turns", a list of texts')


def answered(out: Path) -> dict[tuple[str, float], dict[str, Any]]:
    """The file's rows by (id, temperature), without their token ids. A truncated last line is removed from the file.

    Raises `OSError`, and `ValueError` for a file that something else wrote.
    """
    if not out.exists():
        return {}
    mend(out)
    try:
        return {
            (row["id"], row["temperature"]): {k: v for k, v in row.items() if not k.endswith("_ids")}
            for row in read_lines(out)
        }
    except KeyError as error:
        raise ValueError(f"{out}: a line has no {error}, so it was not written by this command") from None


def answers(llm: LLM, part: Sequence[Question], max_prompt_tokens: int, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Rows of the output; questions whose prompt is too long are skipped."""
    max_prompt = min(max_prompt_tokens, llm.engine.max_model_len - max_tokens)
    prompts = [chat_ids(llm.tokenizer, q.text) for q in part]
    kept = [(q, ids) for q, ids in zip(part, prompts, strict=True) if len(ids) <= max_prompt]
    params = [SamplingParams(temperature=q.temperature, max_tokens=max_tokens, seed=q.seed) for q, _ in kept]
    for (q, ids), answer in zip(kept, llm.generate([ids for _, ids in kept], params), strict=True):
        choice = answer.outputs[0]
        yield {
            "id": q.id,
            "temperature": q.temperature,
            "prompt_ids": ids,
            "output_ids": list(choice.token_ids),
            "finished": choice.finish_reason == "stop",
        }


if __name__ == "__main__":
    sys.exit(main())
