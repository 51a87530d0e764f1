"""Serves prompts and records output lengths: `python -m jaxspec.train_predictor.collect --prompts A --out B`.

A prompt file holds one JSON object per line with "turns" (the user's texts), usually an "id", and "replies" if there
are several turns. Every turn is asked with the earlier turns and their replies as history: the file's replies, or with
--history own the model's. Each answer runs to its end token or to --max-tokens and gives one line of output:
{"id", "turn", "temperature", "prompt", "length", "capped", "group", "source", "model"}. "capped" means that the answer
was cut, so its true length exceeds "length". A second run resumes with the turns that are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TextIO

from jaxspec.config import parse_overrides
from jaxspec.draft.distill.generate import count
from jaxspec.draft.distill.lines import mend, read_lines
from jaxspec.engine.engine import Engine
from jaxspec.errors import explained
from jaxspec.llm import LLM
from jaxspec.models.load.tokenizer import Tokenizer
from jaxspec.outputs import OutputDelta
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.train_predictor import command as training
from jaxspec.train_predictor.data import group_of

PROG = "jaxspec.train_predictor.collect"

#: Most requests submitted to the engine at a time, running and waiting.
AT_ONCE = 128


class Key(NamedTuple):
    """Identifies a row of the output."""

    id: str
    temperature: float
    turn: int


@dataclass
class Conversation:
    """One conversation at one temperature.

    `replies` are the model's if `own`, added as they arrive, else the file's. `left` is set if a turn's prompt is too
    long, and gives its size; later turns are not asked then either.
    """

    id: str
    source: str
    temperature: float
    turns: list[str]
    replies: list[str]
    own: bool
    left: str | None = None

    @property
    def keys(self) -> list[Key]:
        return [Key(self.id, self.temperature, i) for i in range(len(self.turns))]

    def ids(self, tokenizer: Tokenizer, turn: int) -> list[int]:
        """Token ids of the prompt for a turn."""
        if not tokenizer.has_chat_template:
            spoken = [text for pair in zip(self.turns, self.replies, strict=False) for text in pair][: 2 * turn]
            return tokenizer.encode("\n".join([*spoken, self.turns[turn]]))
        messages = []
        for text, reply in zip(self.turns[:turn], self.replies[:turn], strict=True):
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        messages.append({"role": "user", "content": self.turns[turn]})
        return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


@dataclass
class Asked:
    """A turn that was submitted to the engine, and its answer so far."""

    conversation: Conversation
    turn: int
    prompt: str
    group: str
    model: str
    text: str = ""
    length: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def row(self) -> dict[str, Any]:
        c = self.conversation
        row: dict[str, Any] = {
            "id": c.id,
            "turn": self.turn,
            "temperature": c.temperature,
            "prompt": self.prompt,
            "length": self.length,
            "capped": self.finish_reason != "stop",
            "group": self.group,
            "source": c.source,
            "model": self.model,
        }
        if c.own and self.turn + 1 < len(c.turns):
            row["reply"] = self.text  # history of the next turn, in case another run asks it
        return row


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="JSONL")
    parser.add_argument("--out", required=True, metavar="JSONL", help="output file; appended to")
    parser.add_argument("--model", default="smollm2-135m")
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
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    out = Path(args.out)
    try:
        wanted = conversations(args.prompts, args.temperature, args.history == "own", args.seed)[: args.limit]
        out.parent.mkdir(parents=True, exist_ok=True)
        done = collected(out)
        fitting(done, args.model, args.max_tokens)
        total = sum(len(c.turns) for c in wanted)
        missing = deque(turns_left(wanted, done))
        if not missing:
            print(f"{out}: all {total} turns were already answered")
            return 0
        settings = {"draft": (), "max_num_seqs": 64, **parse_overrides(args.set)}
        llm = LLM(**settings | {"model": args.model})
    except (OSError, ValueError) as error:
        return training.fail(PROG, explained(error))
    answered = sum(key in done for c in wanted for key in c.keys)
    try:
        with llm, out.open("a") as file, progress("answers", total, answered) as advance:
            collect(llm.engine, missing, done, file, args, advance)
    except RuntimeError as error:
        return training.fail(PROG, f"{error}; run again to resume")
    except KeyboardInterrupt:
        training.fail(PROG, f"interrupted; {out} keeps the finished answers, run again to resume")
        return 130
    report(out, wanted)
    return 0


def conversations(paths: Sequence[str], temperatures: Sequence[float], own: bool, seed: int) -> list[Conversation]:
    """Every conversation at every temperature, shuffled by `seed` and id, so that any prefix is a random sample.

    Raises `OSError`, and `ValueError` if a file holds no prompts, bad ones, or one twice.
    """
    out = [
        Conversation(id, source, t, turns, [] if own else replies, own)
        for path in paths
        for id, source, turns, replies in read_conversations(Path(path), own)
        for t in temperatures
    ]
    if not out:
        raise ValueError(f"no prompts in {', '.join(paths)}")
    (id, _), times = Counter((c.id, c.temperature) for c in out).most_common(1)[0]
    if times > 1:
        raise ValueError(f"two prompts have the id {id!r}, or a file or temperature was given twice")
    return sorted(out, key=lambda c: _stable_hash(seed, "order", c.id, c.temperature))


def read_conversations(path: Path, own: bool) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """(id, source, user turns, replies) of each line. Unless the history is the model's `own` replies, turns without
    replies to all earlier turns are left out. Raises `OSError` and `ValueError`."""
    for i, row in enumerate(read_lines(path)):
        id, turns, replies = str(row.get("id", f"{path.stem}-{i}")), row.get("turns"), row.get("replies") or []
        if not (isinstance(turns, list) and turns and all(isinstance(t, str) for t in turns)):
            raise ValueError(f'{path}: prompt {id} has no "turns", a list of texts')
        if not (isinstance(replies, list) and all(isinstance(r, str) for r in replies)):
            raise ValueError(f'{path}: "replies" of prompt {id} must be a list of texts')
        yield id, str(row.get("dataset", path.stem)), turns if own else turns[: len(replies) + 1], replies


def collected(out: Path) -> dict[Key, dict[str, Any]]:
    """The rows of an output file. A truncated last line is removed from it. Raises `OSError` and `ValueError`."""
    if not out.exists():
        return {}
    mend(out)
    try:
        return {Key(row["id"], row["temperature"], row["turn"]): row for row in read_lines(out)}
    except KeyError as error:
        raise ValueError(f"{out}: a line has no {error}, so it was not written by this command") from None


def fitting(done: dict[Key, dict[str, Any]], model: str, cap: int) -> None:
    """Raises `ValueError` if earlier rows have another model or a lower cap than the new ones will have."""
    for row in done.values():
        if row.get("model", model) != model:
            raise ValueError(f"--model: {row['id']} was answered by {row['model']}; set another --out")
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
    missing: deque[tuple[Conversation, int]],
    done: dict[Key, dict[str, Any]],
    file: TextIO,
    args: argparse.Namespace,
    advance: Callable[[], None],
) -> None:
    """Ask the `missing` turns, up to `AT_ONCE` at a time, and write a line when an answer ends.

    Raises `RuntimeError` if the engine or a request fails, or if --max-tokens leaves no room for prompts.
    """
    max_prompt = min(args.max_prompt_tokens, engine.max_model_len - args.max_tokens)
    if max_prompt < 1:
        raise RuntimeError(
            f"--max-tokens {args.max_tokens} leaves no room for a prompt in {engine.max_model_len} tokens"
        )
    ended: SimpleQueue[Asked] = SimpleQueue()
    running = 0
    while missing or running:
        while missing and running < AT_ONCE:
            conversation, turn = missing.popleft()
            ids = conversation.ids(engine.tokenizer, turn)
            if len(ids) > max_prompt:
                conversation.left = f"{len(ids)} tokens"
                advance()
                continue
            seed = _stable_hash(args.seed, conversation.id, conversation.temperature, turn)
            params = SamplingParams(temperature=conversation.temperature, max_tokens=args.max_tokens, seed=seed)
            # By the first prompt: several conversations may begin with it, and files of token ids may hold it too.
            first = engine.tokenizer.decode(conversation.ids(engine.tokenizer, 0))
            asked = Asked(conversation, turn, engine.tokenizer.decode(ids), group_of(first), args.model)
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
        done[Key(row["id"], row["temperature"], row["turn"])] = row
        if asked.conversation.own and asked.turn + 1 < len(asked.conversation.turns):
            asked.conversation.replies.append(asked.text)
            missing.append((asked.conversation, asked.turn + 1))
        advance()


def _collect_into(asked: Asked, ended: SimpleQueue[Asked]) -> Callable[[OutputDelta], None]:
    """A request's callback, for the engine's thread: collects the answer and finally puts it into `ended`."""

    def take(delta: OutputDelta) -> None:
        asked.text += delta.text
        asked.length += len(delta.token_ids)
        if delta.finish_reason is not None:
            asked.finish_reason, asked.error = delta.finish_reason, delta.error
            ended.put(asked)

    return take


def report(out: Path, wanted: Sequence[Conversation]) -> None:
    """Print a summary of the output file."""
    rows = collected(out).values()
    lengths = sorted(row["length"] for row in rows)
    capped = sum(row["capped"] for row in rows)
    if lengths:
        print(f"{out}: {len(lengths)} rows, median {lengths[len(lengths) // 2]} tokens, {capped} capped")
    if left := sum(c.left is not None for c in wanted):
        print(f"{left} conversations were left out, or their last turns, because prompts were too long")


def _stable_hash(*parts: Any) -> int:
    """A 60-bit hash that is the same in every process."""
    return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:15], 16)


if __name__ == "__main__":
    sys.exit(main())
