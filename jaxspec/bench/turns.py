"""Compared presets take turns: one pass over the same prompts each, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxspec.bench.contender import Contender, naming_preset
from jaxspec.bench.estimates import Estimate, relative
from jaxspec.bench.record import drive
from jaxspec.bench.report import Report, Sample, Slo, summarise
from jaxspec.sampling_params import SamplingParams

#: Fields of `EngineStats` about speculation; counted as 0 where an engine's stats lack them.
COUNTERS = ("draft_tokens", "accepted_tokens", "verifications")


@dataclass(frozen=True, slots=True)
class Work:
    """What the turns ask: `size` prompts, `level` at a time; with `new`, other ones in each turn.

    params: of each prompt of all turns. turns_before: turns of other concurrencies before the first one of this.
    times: when the prompts of a turn arrive, in seconds; None: as `level` says. slo: what the report counts.
    """

    params: Sequence[SamplingParams]
    size: int
    level: int
    new: bool = False
    turns_before: int = 0
    times: Sequence[float] | None = None
    slo: Slo | None = None

    def prompts_of(self, turn: int) -> range:
        """Indices of the prompts of a turn (0: the first of this level)."""
        first = (self.turns_before + turn) * self.size if self.new else 0
        return range(first, first + self.size)


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass over all prompts: output token ids of each prompt, increase of each of `COUNTERS`, and its report."""

    answers: list[list[int]]
    counts: dict[str, int]
    report: Report


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a turn, by its label; None: not measured."""

    label: str
    of: Callable[[Report], float | None]
    form: str = "{:,.1f}"


METRICS: Mapping[str, Metric] = {
    "tokens_per_s": Metric("output tokens/s", lambda r: r.output_tokens_per_s),
    "mean_ttft_ms": Metric("TTFT, mean", lambda r: r.ttft_ms and r.ttft_ms.mean),
    "p99_ttft_ms": Metric("TTFT, p99", lambda r: r.ttft_ms and r.ttft_ms.p99),
    "mean_tpot_ms": Metric("TPOT, mean", lambda r: r.tpot_ms and r.tpot_ms.mean),
    "p99_tpot_ms": Metric("TPOT, p99", lambda r: r.tpot_ms and r.tpot_ms.p99),
    "mean_e2e_ms": Metric("E2E, mean", lambda r: r.e2e_ms and r.e2e_ms.mean),
    "p99_e2e_ms": Metric("E2E, p99", lambda r: r.e2e_ms and r.e2e_ms.p99),
    "slo_attainment": Metric("SLOs met", lambda r: r.slo_attainment, "{:.1%}"),
}


def ratio(metric: str, own: Sequence[Turn], base: Sequence[Turn]) -> Estimate | None:
    """Ratio of a metric to that of another preset in the same rounds: geometric mean and 95 % interval over the turns.
    None if a value is 0 or was not measured."""
    of = METRICS[metric].of
    return relative([of(turn.report) for turn in own], [of(turn.report) for turn in base])


def is_noise(found: Estimate, turns: int) -> bool:
    """Whether `turns` turns with this ratio show no difference: the interval includes 1, or one turn has none."""
    return turns < 2 or found.low <= 1 <= found.high


def alternate(
    contenders: Sequence[Contender], work: Work, repeats: int, advance: Callable[[], None]
) -> list[list[Turn]]:
    """`repeats` turns of each contender after one warm-up turn each. Another contender begins each round, so that none
    always follows the same one."""
    turns: list[list[Turn]] = [[] for _ in contenders]
    for repeat in range(repeats + 1):
        pairs, begin = list(zip(contenders, turns, strict=True)), repeat % len(contenders)
        for contender, measured in pairs[begin:] + pairs[:begin]:
            with naming_preset(contender.name):
                turn = take_turn(contender, work, repeat)
            advance()
            if repeat:
                measured.append(turn)
    return turns


def take_turn(contender: Contender, work: Work, turn: int) -> Turn:
    """Generate for all prompts of a turn. Raises what the engine raises."""
    llm, chosen = contender.llm, work.prompts_of(turn)
    ids, params = [contender.prompts[i] for i in chosen], [work.params[i] for i in chosen]
    before = llm.engine.stats()
    begin = time.perf_counter()
    if work.times is None:
        outputs = []
        for i in range(0, len(ids), work.level):
            outputs += llm.generate(ids[i : i + work.level], params[i : i + work.level])
        answers, metrics = [output.outputs[0].token_ids for output in outputs], [output.metrics for output in outputs]
    else:
        answers = [[] for _ in ids]
        metrics = drive(llm.engine, work.times, ids, params, answers=answers)
    seconds = time.perf_counter() - begin
    after = llm.engine.stats()
    counts = {name: getattr(after, name, 0) - getattr(before, name, 0) for name in COUNTERS}
    samples = [
        Sample(m.arrival, m.ttft, m.tpot, m.e2e, output_tokens=len(answer))
        for m, answer in zip(metrics, answers, strict=True)
    ]
    return Turn(answers, counts, summarise("compare", samples, seconds, options={}, slo=work.slo))
