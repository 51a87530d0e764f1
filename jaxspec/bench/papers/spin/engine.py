"""SPIN's draft choice on the engine: real prompts of several kinds, with each drafter alone and each policy."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.papers.presets import Preset, engines, overrides
from jaxspec.config import EngineConfig
from jaxspec.draft.speculator import build_speculator
from jaxspec.errors import explained
from jaxspec.outputs import SpeculationCounts
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.request import Request
from jaxspec.sched.spec.draft_choice.choice import DraftChoice, SwitchCost
from jaxspec.sched.spec.speculator import Speculator

if TYPE_CHECKING:
    from jaxspec.llm import LLM

NONE, ORACLE = "no drafts", "oracle"
#: Kinds of prompts, and the options that name their files.
KINDS = {"chat": "alpaca", "code": "code", "maths": "maths"}
#: Fig. 4: the drafter, and the length of its fixed chains.
CHAIN: Mapping[str, Any] = {"draft": "smollm2-eagle", "levels": 3}
#: Draft choice policies.
CHOICES = ("greedy", "epsilon_greedy", "lbss", "fastest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("with --engine")
    options.add_numbers(
        engine,
        ("--engine-prompts N", 12, "prompts of each kind"),
        ("--engine-concurrency N", 4, "requests at once"),
        ("--engine-tokens N", 96, "output cap in tokens"),
    )
    engine.add_argument(
        "--engine-batches", type=options.count, nargs="*", default=(1, 2, 4, 8, 16, 32), metavar="N",
        help="batch sizes of Fig. 4 (default: 1 2 4 8 16 32; without values: skip Fig. 4)",
    )  # fmt: skip


class Given(DraftChoice):
    """Oracle draft choice: the known best drafter of each prompt."""

    def __init__(self, best: Mapping[tuple[int, ...], int]) -> None:
        self._best = best

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        return [self._best[tuple(r.tokens[: r.prompt_len])] for r in requests]


@dataclass(slots=True)
class Bench:
    """An engine on which contenders (draft choices) take turns; each keeps its learned state."""

    llm: LLM
    ids: Sequence[Sequence[int]]
    kinds: Sequence[str]
    params: SamplingParams
    #: Names of the engine's drafters.
    drafters: list[str] = field(init=False)
    contenders: dict[str, Speculator] = field(default_factory=dict)
    #: Each request's decode tokens/s with one drafter for all, by drafter: turns of `[requests]`.
    alone: dict[str, list[np.ndarray]] = field(default_factory=dict)
    #: The oracle's drafter by prompt.
    best: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.drafters = [drafter.name for drafter in self.llm.engine.speculator.drafters]

    def contender(self, names: Sequence[str], choice: DraftChoice | None = None, **settings: Any) -> Speculator:
        """A speculator with these of the engine's drafters and these settings, or this draft choice."""
        config, speculator = self.llm.engine.config, self.llm.engine.speculator
        changed = EngineConfig.load(None, **settings)
        config = config.model_copy(update={name: getattr(changed, name) for name in settings})
        drafters = {d.name: d for d in speculator.drafters}
        step = speculator.step_times
        return build_speculator(config, [drafters[name] for name in names], step, choice=choice)

    def choices(self) -> None:
        """Set the contenders: no drafts, each drafter alone, each policy, and the oracle."""
        oracle = self.contender(self.drafters, Given(self.best))
        self.contenders = {
            NONE: self.contender([]), **{name: self.contender([name]) for name in self.drafters},
            **{name: self.contender(self.drafters, draft_choice=name) for name in CHOICES}, ORACLE: oracle,
        }  # fmt: skip

    def turn(self, name: str, ids: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        """Serve all requests, or those of `ids`, with one contender."""
        speculator = self.contenders[name]
        if name == ORACLE:
            rates = np.array([np.median(self.alone[d], axis=0) for d in self.drafters])
            self.best.update(zip(map(tuple, self.ids), rates.argmax(0).tolist(), strict=True))
        self.llm.engine.set_speculation(speculator)
        switched = speculator.switches
        begun = time.perf_counter()
        outputs = self.llm.generate(ids or self.ids, self.params)
        seconds = time.perf_counter() - begun
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        rates = np.array([1 / o.metrics.tpot if o.metrics.tpot else np.nan for o in outputs])
        counts = SpeculationCounts()
        for output in outputs:
            counts.merge(output.metrics.speculation)
        found = {
            "goodput": tokens / seconds, "accepted": counts.mean_accepted_length,
            "drafted": counts.verifications / tokens, "seconds": seconds,
            "switches": speculator.switches[0] - switched[0],
            "switch_seconds": speculator.switches[1] - switched[1],
        }  # fmt: skip
        if ids:
            return found
        if name in self.drafters:
            self.alone.setdefault(name, []).append(np.nan_to_num(rates))
        kinds = np.array(self.kinds)
        return found | {kind: float(np.nanmean(rates[kinds == kind])) for kind in sorted({*self.kinds})}

    def compare(self, repeats: int, advance: Callable[[], None]) -> dict[str, Any]:
        """Metrics of `repeats` alternating turns by contender, after one turn for warm-up."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.contenders}
        for repeat in range(repeats + 1):
            for name, turns in found.items():
                one = self.turn(name)
                turns += [one] if repeat else []
                advance()
        return columns(found)

    def batches(self, sizes: Sequence[int], repeats: int, advance: Callable[[], None]) -> dict[str, Any]:
        """Metrics by batch size and contender, with static batches that run to their end (Fig. 4)."""
        found = {}
        for size in sizes:
            by_contender: dict[str, list[dict[str, Any]]] = {name: [] for name in self.contenders}
            for repeat in range(repeats + 1):
                first = repeat * size % len(self.ids)
                ids = [self.ids[(first + i) % len(self.ids)] for i in range(size)]
                for name, turns in by_contender.items():
                    one = self.turn(name, ids)
                    turns += [one] if repeat else []
                    advance()
            found[str(size)] = columns(by_contender)
        return found


def columns(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """`{contender: {metric: [turns]}}`."""
    return {name: {key: [turn[key] for turn in turns] for key in turns[0]} for name, turns in found.items()}


def read(args: argparse.Namespace, rng: np.random.Generator) -> list[tuple[str, str]]:
    """(kind, prompt) of every request. Raises OSError or ValueError."""
    files = {kind: path for kind, option in KINDS.items() if (path := getattr(args, option))}
    if not files:
        return [("built-in", text) for text in prompts.choose(prompts.PROMPTS, 3 * args.engine_prompts, rng)]
    return [
        (kind, text)
        for kind, path in files.items()
        for text in prompts.choose(prompts.load(path), args.engine_prompts, rng)
    ]


def on_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Goodput (accepted tokens per second, bonus tokens included) of each contender by turn, and Fig. 4.

    Raises `BenchError`.
    """
    from jaxspec.models.load.tokenizer import chat_ids

    rng = np.random.default_rng(args.seed)
    try:
        texts = read(args, rng)
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    sizes, repeats = args.engine_batches, args.repeats or 3
    # The drafters, smallest first, and the contenders' draft choice where they do not set it.
    common = Preset("spin").but(draft_choice="fastest", enable_prefix_caching=False, max_model_len=2048)
    common = common.but(**overrides(args))
    presets = {"choices": common.but(max_num_seqs=args.engine_concurrency)}
    if sizes:
        presets["batches"] = common.but(draft=[CHAIN["draft"]], max_num_seqs=max(sizes))
    with engines(presets, args.model) as loaded:
        order = rng.permutation(len(texts)).tolist()
        ids = [chat_ids(loaded["choices"].tokenizer, texts[i][1]) for i in order]
        params = SamplingParams(temperature=0, max_tokens=args.engine_tokens)
        bench = {name: Bench(llm, ids, [texts[i][0] for i in order], params) for name, llm in loaded.items()}
        choices = bench["choices"]
        choices.choices()
        with progress("turns", (repeats + 1) * (len(choices.contenders) + 3 * len(sizes))) as advance:
            found = choices.compare(repeats, advance)
            by_size = {}
            if sizes:
                batches, draft = bench["batches"], [CHAIN["draft"]]
                batches.contenders = {
                    NONE: batches.contender([]),
                    "chain": batches.contender(draft, tree="chain", draft_depth=CHAIN["levels"]),
                    "auto": batches.contender(draft),
                }  # fmt: skip
                by_size = batches.batches(sizes, repeats, advance)
        picked = Counter(choices.drafters[i] for i in choices.best.values())
    return {
        "prompts": len(ids), "concurrency": args.engine_concurrency, "tokens": args.engine_tokens, "systems": found,
        "best": dict(picked), "batches": by_size,
    }  # fmt: skip
