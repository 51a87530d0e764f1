"""A fake device with paged memory, and random jobs: shared by the property tests of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from jaxspec.sched import Plan, RequestResult

VOCAB = 3


def kv(previous: int, token: int) -> int:
    """A stand-in for one position's KV: it depends on the whole prefix."""
    return hash((previous, token)) & 0xFFFFFFFF


def solo(prompt: list[int], max_tokens: int) -> list[int]:
    """Prompt and output of a request that runs alone: the reference for scheduled runs."""
    state, output = 0, []
    for token in prompt:
        state = kv(state, token)
    while len(output) < max_tokens:
        output.append(state % VOCAB)
        state = kv(state, output[-1])
    return prompt + output


@dataclass
class Slice:
    """One scheduled request as it was when its step was launched."""

    start: int
    tokens: list[int]
    pages: list[int]
    samples: bool
    levels: int  # most draft tokens that may be accepted
    left: int  # new tokens until max_tokens


class Device:
    """Runs plans on paged memory. It reads earlier positions only through the page table, as a real device does."""

    def __init__(self, page_size: int, drafts: Random | None) -> None:
        self.page_size = page_size
        self.drafts = drafts  # how many draft tokens are accepted; None: plain decoding
        self.memory: dict[tuple[int, int], int] = {}  # (page, offset) -> KV

    def launch(self, plan: Plan) -> list[Slice]:
        return [
            Slice(w.start, w.request.tokens[w.start : w.start + w.count], list(w.request.pages), w.samples,
                  w.levels, w.request.max_tokens - w.request.output_len)
            for w in plan.scheduled
        ]  # fmt: skip

    def read(self, pending: list[Slice]) -> list[RequestResult]:
        return [self._run(part) for part in pending]

    def _run(self, part: Slice) -> RequestResult:
        end, state = part.start + len(part.tokens), 0
        for position, token in enumerate(part.tokens, part.start):
            state = self._compute(part.pages, position, token)
        if not part.samples:
            return RequestResult()
        accepted = self.drafts.randint(0, part.levels) if self.drafts else 0
        new = [state % VOCAB]
        for position in range(end, end + accepted):
            new.append(self._compute(part.pages, position, new[-1]) % VOCAB)
        return RequestResult(tuple(new), "length" if len(new) == part.left else None, part.levels, accepted)

    def _compute(self, pages: list[int], position: int, token: int) -> int:
        previous = self.memory[self._slot(pages, position - 1)] if position else 0
        value = self.memory[self._slot(pages, position)] = kv(previous, token)
        return value

    def _slot(self, pages: list[int], position: int) -> tuple[int, int]:
        return pages[position // self.page_size], position % self.page_size


@dataclass
class Job:
    """A request that arrives at step `arrival` and may be cancelled `cancel` steps later: before that step is planned,
    or while it runs (`during_step`)."""

    arrival: int
    prompt: list[int]
    max_tokens: int
    prompt_logprobs: bool
    cancel: int | None
    during_step: bool


#: Prefixes that requests share, longer than one page.
STEMS = ([0, 1, 2, 0, 1, 1, 2, 0, 0, 2, 1, 0], [0, 1, 2, 0, 2, 2, 2, 1])

prompts = st.builds(
    lambda stem, keep, tail: (stem[:keep] + tail) or [0],
    st.sampled_from(STEMS),
    st.integers(0, 12),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
)
jobs = st.builds(
    Job,
    arrival=st.integers(0, 30),
    prompt=prompts,
    max_tokens=st.integers(1, 12),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
    cancel=st.one_of(st.none(), st.none(), st.integers(0, 12)),
    during_step=st.booleans(),
)


def crowd(random: Random) -> list[Job]:
    """Twelve requests with two shared prefixes that arrive within 20 steps."""
    return [
        Job(random.randint(0, 20), STEMS[random.randint(0, 1)][: random.randint(1, 12)], 12, False, None, False)
        for _ in range(12)
    ]
