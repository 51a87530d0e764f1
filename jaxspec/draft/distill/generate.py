"""The target's answers to prompts, as training text: `python -m jaxspec.draft.distill.generate --prompts A --out B`.

A line of the output: {"id", "temperature", "prompt_ids", "output_ids", "finished", "model", "model_digest"}. A prompt
file holds one JSON object a line with "turns" (the first is asked) and, as a rule, an "id". Run again, it goes on where
it stopped, with the same model.
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

#: Prompts asked for between two writes.
BATCH = 128


class Question(NamedTuple):
    """What is asked once; `id` and `temperature` together are found again in the output."""

    id: str
    temperature: float
    text: str
    seed: int


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxspec.draft.distill.generate", description=__doc__)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="JSONL")
    parser.add_argument("--out", required=True, metavar="JSONL", help="is appended to")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the engine")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8], help="one answer for each")
    parser.add_argument("--max-tokens", type=count, default=256)
    parser.add_argument("--max-prompt-tokens", type=count, default=512, help="longer prompts are left out")
    parser.add_argument("--limit", type=count, help="ask so many questions, those answered before included")
    parser.add_argument("--seed", type=int, default=0, help="of the order and of the samples")
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
            print(f"{out}: all {len(asked)} questions were answered before")
            return 0
        model = load_model(args.model)
        own = origin(model)
        if done:
            check(done.values(), own, str(out))
        settings: dict[str, Any] = {"draft": (), "enable_prefix_caching": False, "max_num_seqs": 64}
        settings |= parse_overrides(args.set)
        if "model" in settings:
            raise ValueError("--set model: name the model with --model")
        llm = LLM(model, **settings)
    except OtherModel as error:
        return training.fail("jaxspec.draft.distill.generate", f"--model: {error}; name another --out")
    except (OSError, ValueError) as error:
        return training.fail("jaxspec.draft.distill.generate", explained(error))
    with llm, out.open("a") as file, progress("answers", len(asked), len(asked) - len(left)) as advance:
        for start in range(0, len(left), BATCH):
            part = left[start : start + BATCH]
            for row in answers(llm, part, args.max_prompt_tokens, args.max_tokens):
                file.write(json.dumps(row | own.fields, separators=(",", ":")) + "\n")
            file.flush()
            for _ in part:
                advance()
    return 0


def questions(paths: Sequence[str], temperatures: Sequence[float], seed: int) -> list[Question]:
    """Every prompt at every temperature, shuffled; a question's own seed follows from its place, not from what is done
    already, so a run that was interrupted writes what it would have written in one go."""
    asked = [(id, t, text) for path in paths for id, text in read_prompts(Path(path)) for t in temperatures]
    random.Random(seed).shuffle(asked)
    return [Question(*q, seed + i) for i, q in enumerate(asked)]


def read_prompts(path: Path) -> Iterator[tuple[str, str]]:
    """(id, first user turn) of each line. Raises `OSError` and `ValueError`."""
    for i, row in enumerate(read_lines(path)):
        id = str(row.get("id", f"{path.stem}-{i}"))
        match row.get("turns"):
            case [str(text), *_]:
                yield id, text
            case _:
                raise ValueError(f'{path}: prompt {id} has no "turns", a list of texts')


def answered(out: Path) -> dict[tuple[str, float], dict[str, Any]]:
    """The answers in a file by (id, temperature), without their tokens; its last line, if cut off, is removed."""
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
    """Lines of the output, without the questions that are too long."""
    most = min(max_prompt_tokens, llm.engine.max_model_len - max_tokens)
    prompts = [chat_ids(llm.tokenizer, q.text) for q in part]
    kept = [(q, ids) for q, ids in zip(part, prompts, strict=True) if len(ids) <= most]
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
