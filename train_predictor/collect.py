"""Collects a model's answers as training data: `python -m jaxspec.train_predictor.collect --prompts FILE`.

Length predictors and drafters are trained on them (`jaxspec.train_predictor`, `jaxspec.draft.distill`).

A prompt file holds one JSON object per line with "turns" (the user's texts), usually an "id", and "replies" if there
are several turns. Every turn is asked with the earlier turns and their replies as history: the file's replies, or with
--history own the model's. Each answer runs to its end token or to --max-tokens and gives one line of output:
{"id", "turn", "temperature", "prompt", "prompt_ids", "output_ids", "length", "capped", "group", "source", "model",
"model_digest"}. "capped" means that the answer was cut, so its true length exceeds "length". A second run with the same
model resumes with the turns that are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from jaxspec.bench.options import count
from jaxspec.config import EngineConfig, parse_overrides
from jaxspec.engine.engine import Engine
from jaxspec.errors import explained
from jaxspec.llm import LLM
from jaxspec.models.load import load_model
from jaxspec.outputs import OutputDelta
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.train_predictor import command as training
from jaxspec.train_predictor import ending
from jaxspec.train_predictor.answers import Origin, OtherModel, check, mend, origin_of, read_lines
from jaxspec.train_predictor.conversations import Conversation, Key, conversations, stable_hash
from jaxspec.train_predictor.data import group_of
from jaxspec.train_predictor.names import answers_file

PROG = "jaxspec.train_predictor.collect"

#: Fields of a row that resuming or the trainers need.
NEEDED = frozenset(
    ("id", "turn", "temperature", "prompt_ids", "output_ids", "length", "capped", "model", "model_digest")
)


@dataclass
class Asked:
    """A turn that was submitted to the engine, and its answer so far."""

    conversation: Conversation
    turn: int
    prompt: str
    prompt_ids: list[int]
    group: str
    model: Origin
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def row(self) -> dict[str, Any]:
        c = self.conversation
        row: dict[str, Any] = {
            "id": c.id,
            "turn": self.turn,
            "temperature": c.temperature,
            "prompt": self.prompt,
            "prompt_ids": self.prompt_ids,
            "output_ids": self.output_ids,
            "length": len(self.output_ids),
            "capped": self.finish_reason != "stop",
            "group": self.group,
            "source": c.source,
            **self.model.fields,
        }
        if c.own and self.turn + 1 < len(c.turns):
            row["reply"] = self.text  # history of the next turn, in case another run asks it
        return row


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="JSONL")
    parser.add_argument("--model", default="smollm2-135m", help="the model that answers (default: smollm2-135m)")
    parser.add_argument(
        "--out",
        metavar="JSONL",
        help="output file; appended to (default: trained/NAME/answers.jsonl, the model's name)",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an engine setting; repeatable")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="one answer each (default: 0)")
    parser.add_argument("--max-tokens", type=count, default=1024, help="cap of an answer (default: 1024)")
    parser.add_argument("--max-prompt-tokens", type=count, default=2048, help="skip longer prompts (default: 2048)")
    parser.add_argument(
        "--history", choices=("file", "own"), default="file",
        help="replies that later turns follow: the file's or the model's own (default: file)",
    )  # fmt: skip
    parser.add_argument("--limit", type=count, help="number of conversations, those already asked included")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and of sampling (default: 0)")
    args = parser.parse_args(argv)
    args.out = args.out or answers_file(args.model)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return _run(args)
    except (OSError, ValueError) as error:
        return training.fail(PROG, explained(error))
    except KeyboardInterrupt:
        return ending.interrupted(PROG, argv, f"{args.out} keeps the finished answers")


def _run(args: argparse.Namespace) -> int:
    out = Path(args.out)
    wanted = conversations(args.prompts, args.temperature, args.history == "own", args.seed)[: args.limit]
    training.check_output("--out", out)
    done = collected(out)
    settings = {"draft": (), "max_num_seqs": 64, **parse_overrides(args.set)}
    if "model" in settings:
        raise ValueError("--set model: set the model with --model")
    config = EngineConfig.load(None, **settings)  # before the model is loaded
    settings.setdefault("max_queued_requests", max(config.max_queued_requests, 2 * config.max_num_seqs))
    if config.max_model_len is not None:
        most_prompt(args, config.max_model_len)
    model = load_model(args.model)
    origin = origin_of(model)
    fitting(done, origin, args.max_tokens, out)
    total = sum(len(c.turns) for c in wanted)
    missing = deque(turns_left(wanted, done))
    if not missing:
        print(f"{out}: all {total} turns were already answered")
        ending.ended([out], *ending.training_commands(args.model, str(out)))
        return 0
    most_prompt(args, min(config.max_model_len or model.config.max_position, model.config.max_position))
    llm = LLM(model, **settings)
    answered = sum(key in done for c in wanted for key in c.keys)
    try:
        with llm, out.open("a") as file, progress("answers", total, answered) as advance:
            collect(llm.engine, origin, missing, done, file, args, advance)
    except RuntimeError as error:
        return training.fail(PROG, f"{error}; run again to resume")
    report(out, done, wanted)
    ending.ended([out], *ending.training_commands(args.model, str(out)))
    return 0


def most_prompt(args: argparse.Namespace, longest: int) -> int:
    """Most tokens of a prompt, where prompt and answer have at most `longest`. Raises `ValueError` if there are none.

    Called as soon as a limit is known: that of the settings before the model is loaded, the model's before its weights
    are read, and that of the KV pool, which may be smaller, when the engine is there.
    """
    if longest <= args.max_tokens:
        raise ValueError(f"--max-tokens {args.max_tokens} leaves no room for a prompt in {longest} tokens")
    return min(args.max_prompt_tokens, longest - args.max_tokens)


def collected(out: Path) -> dict[Key, dict[str, Any]]:
    """The rows of an output file without their token ids. A truncated last line is removed from the file.

    Raises `OSError`, and `ValueError` for a file that something else wrote.
    """
    if not out.exists():
        return {}
    mend(out)
    done = {}
    for row in read_lines(out):
        if lacking := NEEDED - row.keys():
            raise ValueError(
                f"{out}: a line has no {', '.join(sorted(lacking))}, so it was not written by this command, or by an "
                "earlier version of it; set another --out"
            )
        _keep(done, row)
    return done


def _keep(done: dict[Key, dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row without its token ids, which may be many."""
    done[Key(row["id"], row["temperature"], row["turn"])] = {
        name: value for name, value in row.items() if not name.endswith("_ids")
    }


def fitting(done: dict[Key, dict[str, Any]], model: Origin, cap: int, out: Path) -> None:
    """Raises `ValueError` if earlier rows have another model or a lower cap than the new ones will have."""
    try:
        check(done.values(), model, str(out))
    except OtherModel as error:
        raise ValueError(f"--model: {error}; set another --out") from None
    for row in done.values():
        if row["capped"] and row["length"] < cap:
            raise ValueError(f"--max-tokens: {row['id']} was cut at {row['length']} tokens; set another --out")


def turns_left(wanted: Sequence[Conversation], done: dict[Key, dict[str, Any]]) -> Iterator[tuple[Conversation, int]]:
    """Missing turns that can be asked now: all of them, or only the first if the history is the model's own replies.

    Restores those replies from `done`. Raises `ValueError` if they were not recorded.
    """
    for c in wanted:
        missing = [key.turn for key in c.keys if key not in done]
        if c.own and missing:
            try:
                c.replies = [done[key]["reply"] for key in c.keys[: missing[0]]]
            except KeyError:
                raise ValueError(f"{c.id} was collected with --history file; set another --out") from None
            missing = missing[:1]
        yield from ((c, turn) for turn in missing)


def collect(
    engine: Engine,
    origin: Origin,
    missing: deque[tuple[Conversation, int]],
    done: dict[Key, dict[str, Any]],
    file: TextIO,
    args: argparse.Namespace,
    advance: Callable[[], None],
) -> None:
    """Ask the `missing` turns of the model `origin`, as many at a time as may wait in the engine's queue; write a line
    when an answer ends.

    Raises `RuntimeError` if the engine or a request fails, and `ValueError` as `most_prompt` does.
    """
    max_prompt = most_prompt(args, engine.max_model_len)
    ended: SimpleQueue[Asked] = SimpleQueue()
    running = 0
    while missing or running:
        while missing and running < engine.config.max_queued_requests:
            conversation, turn = missing.popleft()
            ids = conversation.ids(engine.tokenizer, turn)
            if len(ids) > max_prompt:
                conversation.left = f"{len(ids)} tokens"
                advance()
                continue
            seed = stable_hash(args.seed, conversation.id, conversation.temperature, turn)
            params = SamplingParams(temperature=conversation.temperature, max_tokens=args.max_tokens, seed=seed)
            # By the first prompt: several conversations may begin with it, and files of token ids may hold it too.
            first = engine.tokenizer.decode(conversation.ids(engine.tokenizer, 0))
            asked = Asked(conversation, turn, engine.tokenizer.decode(ids), ids, group_of(first), origin)
            engine.submit(ids, params, _collect_into(asked, ended))
            running += 1
        if not running:
            continue
        try:
            asked = ended.get(timeout=1.0)
        except Empty:
            if engine.health == "dead":
                raise RuntimeError(engine.failure or "the engine has stopped") from None
            continue
        running -= 1
        if asked.error or asked.finish_reason not in ("stop", "length"):
            raise RuntimeError(asked.error or f"a request ended with {asked.finish_reason}")
        row = asked.row()
        file.write(json.dumps(row, separators=(",", ":")) + "\n")
        file.flush()
        _keep(done, row)
        if asked.conversation.own and asked.turn + 1 < len(asked.conversation.turns):
            asked.conversation.replies.append(asked.text)
            missing.append((asked.conversation, asked.turn + 1))
        advance()


def _collect_into(asked: Asked, ended: SimpleQueue[Asked]) -> Callable[[OutputDelta], None]:
    """A request's callback, for the engine's thread: collects the answer and finally puts it into `ended`."""

    def take(delta: OutputDelta) -> None:
        asked.text += delta.text
        asked.output_ids += delta.token_ids
        if delta.finish_reason is not None:
            asked.finish_reason, asked.error = delta.finish_reason, delta.error
            ended.put(asked)

    return take


def report(out: Path, done: dict[Key, dict[str, Any]], wanted: Sequence[Conversation]) -> None:
    """Print a summary of the output file, whose rows are `done`."""
    rows = done.values()
    lengths = sorted(row["length"] for row in rows)
    capped = sum(row["capped"] for row in rows)
    if lengths:
        print(f"{out}: {len(lengths)} rows, median {lengths[len(lengths) // 2]} tokens, {capped} capped")
    if left := sum(c.left is not None for c in wanted):
        print(f"{left} conversations were left out, or their last turns, because prompts were too long")


if __name__ == "__main__":
    sys.exit(main())
