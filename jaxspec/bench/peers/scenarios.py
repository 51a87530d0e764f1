"""What is measured: the requests of a turn and the numbers taken from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import httpx
import numpy as np

from jaxspec.bench import BenchError, prompts
from jaxspec.bench.client import Endpoint, ask
from jaxspec.bench.report import Sample
from jaxspec.models.load.tokenizer import Tokenizer

OUTPUT, INPUT, TTFT, TPOT = "output tokens/s", "input tokens/s", "TTFT, ms", "TPOT, ms"
#: Tokens of the prompt that arrives while others decode, and how many decode.
ARRIVING, DECODING = 256, 8
#: A request fails if nothing arrives for this many seconds.
REQUEST_TIMEOUT = 300.0


@dataclass(slots=True)
class Turn:
    """What one server did in one turn: numbers by measure, and the text of each answer."""

    measures: dict[str, float]
    texts: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class Client:
    """Sends requests of one turn. Raises `BenchError` if one fails or stops early."""

    def __init__(self, http: httpx.AsyncClient, endpoint: Endpoint) -> None:
        self._http, self._endpoint = http, endpoint

    async def ask(self, prompt: str, tokens: int, pieces: list[str] | None = None) -> Sample:
        sample = await ask(self._http, self._endpoint, prompt, tokens, pieces)
        if sample.error:
            raise BenchError(sample.error)
        if sample.output_tokens != tokens:
            raise BenchError(f"a request for {tokens} tokens got {sample.output_tokens}")
        return sample


Run = Callable[[Client, Sequence[str]], Awaitable[Turn]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """`draw` gives the prompts of a turn, `run` sends them and measures."""

    draw: Callable[[Prompts, np.random.Generator], list[str]]
    run: Run
    measures: tuple[str, ...]
    temperature: float = 0.0


class Prompts:
    """Prompts as text, because not every server takes token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` built-in prompts as user messages."""
        texts = prompts.choose(prompts.PROMPTS, count, rng)
        if not self._tokenizer.has_chat_template:
            return texts
        return [self._tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]

    def long(self, rng: np.random.Generator, tokens: int) -> str:
        """A text of about `tokens` tokens: the built-in prompts in random order."""
        texts = prompts.choose(prompts.PROMPTS, len(prompts.PROMPTS), rng)
        ids = prompts.of_tokens([self._tokenizer.encode(text + "\n", False) for text in texts], tokens, 0)
        return self._tokenizer.decode(ids)


def scenarios(streams: int, tokens: int, prefills: Sequence[int]) -> Mapping[str, Scenario]:
    """All scenarios by name."""
    found: dict[str, Scenario] = {}
    for kind, temperature in (("decode", 0.0), ("sample", 0.8)):
        for count in dict.fromkeys((1, streams)):
            found[f"{kind}-{count}"] = decode(count, tokens, temperature)
    return found | {f"prefill-{n}": prefill(n) for n in prefills} | {"loaded": loaded(tokens)}


def decode(count: int, tokens: int, temperature: float) -> Scenario:
    """`count` streams at once, of `tokens` output tokens each."""

    async def run(client: Client, texts: Sequence[str]) -> Turn:
        pieces: list[list[str]] = [[] for _ in texts]
        begin = time.perf_counter()
        samples = await _all(client.ask(text, tokens, part) for text, part in zip(texts, pieces, strict=True))
        seconds = time.perf_counter() - begin
        measures = {OUTPUT: count * tokens / seconds, TPOT: 1e3 * median(s.tpot or 0.0 for s in samples)}
        return Turn(measures, ["".join(part) for part in pieces], samples)

    return Scenario(lambda made, rng: made.chat(rng, count), run, (OUTPUT, TPOT), temperature)


def prefill(tokens: int) -> Scenario:
    """One prompt of about `tokens` tokens, one output token."""

    async def run(client: Client, texts: Sequence[str]) -> Turn:
        sample = await client.ask(texts[0], 1)
        assert sample.ttft is not None
        return Turn({INPUT: sample.input_tokens / sample.ttft, TTFT: 1e3 * sample.ttft}, samples=[sample])

    return Scenario(lambda made, rng: [made.long(rng, tokens)], run, (INPUT, TTFT))


def loaded(tokens: int) -> Scenario:
    """A request that arrives when all of `DECODING` streams have their first token."""

    async def run(client: Client, texts: Sequence[str]) -> Turn:
        pieces: list[list[str]] = [[] for _ in texts[1:]]

        async def arrive() -> Sample:
            while not all(pieces):
                await asyncio.sleep(0.002)
            return await client.ask(texts[0], 1)

        others = (client.ask(text, tokens, part) for text, part in zip(texts[1:], pieces, strict=True))
        samples = await _all([arrive(), *others])
        assert samples[0].ttft is not None
        return Turn({TTFT: 1e3 * samples[0].ttft}, samples=samples)

    return Scenario(lambda made, rng: [made.long(rng, ARRIVING), *made.chat(rng, DECODING)], run, (TTFT,))


async def _all(requests) -> list[Sample]:
    """The samples of all requests. Raises the first `BenchError` alone, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request) for request in requests]
    except* BenchError as errors:
        error = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise error


def take(scenario: Scenario, endpoint: Endpoint, texts: Sequence[str]) -> Turn:
    """Send the requests of one turn to one server. Raises `BenchError`."""

    async def run() -> Turn:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=httpx.Timeout(REQUEST_TIMEOUT), limits=limits) as http:
            return await scenario.run(Client(http, endpoint), texts)

    return asyncio.run(run())
