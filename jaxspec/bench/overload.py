"""Ask a server for several times what it can serve, and see what it still delivers.

First the capacity (requests per second with --concurrency in flight) and the goodput below it are measured, then
Poisson arrivals at --factor times the capacity come for --seconds: most of them from one API key that ignores 429, the
rest from a second key at a tenth of the capacity. Afterwards single requests are sent until they meet the SLO again,
and --streams requests are opened at once. Goodput counts the output tokens of requests that meet the SLO
(AdaServe's definition) by the time at which they end, from half a minute after the beginning of each load on.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.client import Endpoint, ask
from jaxspec.bench.reliability import commit, record
from jaxspec.bench.report import Sample, Slo, machine, write_json
from jaxspec.bench.serve import Job, drive, find_model
from jaxspec.progress import progress

#: Loads at which goodput below saturation is measured, in capacities; its maximum is the peak.
LOADS = (0.5, 0.7, 0.9, 1.0)
#: Load of the second API key, in capacities.
OTHER = 0.1
#: Seconds between two requests of the recovery, and requests in a row that meet the SLO when it is over.
PROBE, PROBES = 0.5, 3
#: Seconds of a load, at most half of it, in which the server is still filling.
FILLING = 30.0
#: Seconds after which the recovery is given up.
PATIENCE = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server's URL")
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="twice: the key that sends too much, and the other one (default: both are without one)",
    )  # fmt: skip
    options.add_numbers(
        parser,
        ("--factor X", 3.0, "load in capacities"),
        ("--seconds SECONDS", 1200.0, "duration of the overload"),
        ("--phase-seconds SECONDS", 60.0, "duration of each measurement before"),
        ("--concurrency N", 64, "requests in flight while the capacity is measured"),
        ("--max-tokens N", 48, "output tokens of a request"),
        ("--slo-ttft-ms MS", 5000.0, "TTFT target"),
        ("--slo-tpot-ms MS", 250.0, "TPOT target"),
    )
    parser.add_argument(
        "--streams", type=int, default=0, metavar="N", help="streams opened at once afterwards (default: 0)"
    )
    parser.add_argument("--label", default="", metavar="TEXT", help="what the server runs with, for the table")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and arrivals (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument(
        "--record", metavar="FOLDER", help="add them to reliability.json in this folder, and renew the page's tables"
    )


def run(args: argparse.Namespace) -> int:
    """Print the results. Returns 1 if a request failed other than with 429."""
    found = asyncio.run(_run(args))
    for name, value in found.items():
        if name not in ("minutes", "machine", "options"):
            print(f"{name.replace('_', ' ')}: {value}")
    runs = {"overload": [found | {"commit": commit()}]}
    if args.json:
        write_json(args.json, runs)
    if args.record:
        record(runs, Path(args.record))
    return int(bool(found["failures"]))


@dataclass
class Load:
    """Sends requests with one or two API keys. `retries`: the Retry-After of all 429, in seconds; None: it had none."""

    clients: Sequence[httpx.AsyncClient]
    endpoint: Endpoint
    texts: Sequence[str]
    max_tokens: int
    rng: np.random.Generator
    retries: list[float | None] = field(default_factory=list[float | None])

    async def poisson(self, rates: Sequence[float], seconds: float, what: str) -> tuple[list[list[Sample]], float]:
        """Poisson arrivals at these rates, one for each client. -> samples of each client; the load generator's lag in
        seconds."""
        jobs = sorted(
            (Job(float(at), self.text(), self.max_tokens, str(client))
             for client, rate in enumerate(rates) for at in self._times(rate, seconds)),
            key=lambda job: job.at,
        )  # fmt: skip
        with progress(what, len(jobs)) as advance:
            samples, _, lag = await drive(jobs, self._send, advance=advance)
        return [[s for s in samples if s.category == str(client)] for client in range(len(rates))], lag

    async def closed(self, concurrency: int, seconds: float) -> tuple[list[Sample], float]:
        """`concurrency` requests in flight for this long. -> all samples, and the requests per second that ended in the
        second half of the time. First requests have different lengths, so that they do not end in waves."""
        begin, samples = time.perf_counter(), list[Sample]()

        async def one(i: int) -> None:
            tokens = max(1, self.max_tokens * (i + 1) // concurrency)
            while time.perf_counter() < begin + seconds:
                samples.append(await self.send(tokens=tokens))
                tokens = self.max_tokens
                if samples[-1].error:  # a refused client that asks again at once would take the server's CPU time
                    await asyncio.sleep(PROBE)

        await asyncio.gather(*(one(i) for i in range(concurrency)))
        ends = [s.start + s.e2e - begin for s in samples if s.e2e is not None]
        return samples, sum(seconds / 2 <= end < seconds for end in ends) / (seconds / 2)

    async def send(self, client: int = 0, tokens: int | None = None) -> Sample:
        """One request now, of `tokens` output tokens, by default `max_tokens`."""
        return await self._send(Job(0.0, self.text(), tokens or self.max_tokens, str(client)))

    def text(self) -> str:
        """A random prompt."""
        return str(self.texts[int(self.rng.integers(len(self.texts)))])

    async def _send(self, job: Job) -> Sample:
        assert job.category is not None
        sample = await ask(self.clients[int(job.category)], self.endpoint, job.prompt, job.max_tokens)
        sample.category = job.category
        return sample

    def _times(self, rate: float, seconds: float) -> np.ndarray:
        """Arrival times within `seconds`: float64, ascending."""
        count = self.rng.poisson(rate * seconds)
        return np.sort(self.rng.uniform(0, seconds, count))

    async def note(self, response: httpx.Response) -> None:
        """Keep the Retry-After of a 429."""
        if response.status_code == 429:
            told = response.headers.get("retry-after", "")
            self.retries.append(float(told) if told.isdecimal() else None)


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    if len(args.api_key) not in (0, 2):
        raise BenchError("--api-key: give two keys or none")
    url = args.base_url.rstrip("/").removesuffix("/v1")
    headers = [{"Authorization": f"Bearer {key}"} for key in args.api_key] or [{}, {}]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    clients = [httpx.AsyncClient(headers=h, timeout=httpx.Timeout(600.0), limits=limits) for h in headers]
    try:
        model = await find_model(clients[0], url, None)
        endpoint = Endpoint(url, model, "chat", {"temperature": 0.0, "ignore_eos": True})
        load = Load(clients, endpoint, prompts.PROMPTS, args.max_tokens, np.random.default_rng(args.seed))
        for client in clients:
            client.event_hooks["response"].append(load.note)
        return await _measure(args, load)
    finally:
        for client in clients:
            await client.aclose()


async def _measure(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    if (first := await load.send()).error:
        raise BenchError(f"the first request failed: {first.error}")
    samples, capacity = await load.closed(args.concurrency, args.phase_seconds)
    everything = list(samples)
    if not capacity:
        raise BenchError(
            f"no request ended within --phase-seconds {args.phase_seconds:g}: {samples[0].error or 'slow'}"
        )
    below: dict[str, float] = {}
    for share in LOADS:
        (samples,), _ = await load.poisson([share * capacity], args.phase_seconds, f"{share:g} × capacity")
        below[f"{share:g}"] = round(goodput(samples, slo, args.phase_seconds), 1)
        everything += samples
    load.retries.clear()
    rates = [(args.factor - OTHER) * capacity, OTHER * capacity]
    ((greedy, other), lag), (recovered, probes) = await asyncio.gather(
        load.poisson(rates, args.seconds, f"{args.factor:g} × capacity"), _recover(load, slo, args.seconds)
    )
    both = greedy + other
    retries, peak, delivered = list(load.retries), max(below.values()), goodput(both, slo, args.seconds)
    streams, longest = await _streams(load, args.streams)
    everything += both + probes + streams
    failures = Counter(s.error for s in everything if s.error and not _refused(s))
    served = [s for s in both if s.error is None and s.ttft is not None]
    ttft = np.array([s.ttft for s in served], float)
    return {
        "server": args.label or args.base_url,
        "requests": len(everything),
        "capacity_requests_per_s": round(capacity, 2),
        "goodput_below": below,
        "goodput_peak": peak,
        "goodput": round(delivered, 1),
        "share_of_peak": round(delivered / peak, 3) if peak else None,
        "minutes": minutes(both, slo, args.seconds),
        "sent": len(both),
        "served": len(served),
        "refused": sum(_refused(s) for s in both),
        "retry_after_s": [min(told), max(told)] if (told := [r for r in retries if r is not None]) else [],
        "without_retry_after": retries.count(None),
        "ttft_s": [round(float(q), 2) for q in np.percentile(ttft, (50, 99, 100))] if len(ttft) else [],
        "attainment_of_served": _rate(served, slo),
        "other_key": {
            "sent": len(other),
            "served": sum(s.error is None for s in other),
            "attainment": _rate(other, slo),
        },
        "generator_lag_s": round(lag, 2),
        "recovery_s": None if recovered is None else round(recovered, 1),
        "streams": {
            "opened": len(streams),
            "served": sum(s.error is None for s in streams),
            "refused": sum(_refused(s) for s in streams),
            "longest_s": round(longest, 1),
        },
        "failures": dict(failures),
        "options": options.plain(args),
        "machine": machine(),
    }


def _refused(sample: Sample) -> bool:
    """Whether the answer was 429."""
    return sample.error is not None and sample.error.startswith("HTTP 429")


def goodput(samples: Sequence[Sample], slo: Slo, seconds: float) -> float:
    """Output tokens per second of the requests that met the SLO, by the time at which they ended. Those that ended
    while the server was filling, or after the load, do not count."""
    begin = min(FILLING, seconds / 2)
    return sum(s.output_tokens for s in samples if slo.met_by(s) and begin <= _end(s) < seconds) / (seconds - begin)


def minutes(samples: Sequence[Sample], slo: Slo, seconds: float) -> list[float]:
    """The goodput of requests that ended in each whole minute, in tokens per second."""
    sums = np.zeros(int(seconds // 60))
    for sample in samples:
        if slo.met_by(sample) and (minute := int(_end(sample) // 60)) < len(sums):
            sums[minute] += sample.output_tokens
    return [round(float(tokens) / 60, 1) for tokens in sums]


def _end(sample: Sample) -> float:
    """Seconds from the beginning of the load."""
    return sample.start + (sample.e2e or 0.0)


def _rate(samples: Sequence[Sample], slo: Slo) -> float:
    """Share of the samples that met the SLO."""
    return round(sum(slo.met_by(s) for s in samples) / max(1, len(samples)), 4)


async def _recover(load: Load, slo: Slo, delay: float) -> tuple[float | None, list[Sample]]:
    """Wait until the overload ends, then send single requests with the key that sent too much, until some in a row meet
    the SLO. -> seconds from the end to the first of those, None if they take more than five minutes; their samples."""
    await asyncio.sleep(delay)
    ended = since = time.perf_counter()
    samples, good = list[Sample](), 0
    while good < PROBES:
        begin = time.perf_counter()
        if begin - ended > PATIENCE:
            return None, samples
        samples.append(await load.send())
        since, good = (since if good else begin, good + 1) if slo.met_by(samples[-1]) else (begin, 0)
        await asyncio.sleep(PROBE)
    return since - ended, samples


async def _streams(load: Load, count: int) -> tuple[list[Sample], float]:
    """Open this many streams at once. -> their samples, and seconds until the last has ended."""
    begin = time.perf_counter()
    with progress("streams", count) as advance:

        async def one(i: int) -> Sample:
            sample = await load.send(i % len(load.clients))
            advance()
            return sample

        samples = await asyncio.gather(*(one(i) for i in range(count)))
    return list(samples), time.perf_counter() - begin
