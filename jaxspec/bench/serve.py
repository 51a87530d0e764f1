"""Load test of an OpenAI-compatible server: send requests at their arrival times and measure their latencies."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np

from jaxspec.bench import BenchError, options, prompts, slo_mix
from jaxspec.bench.client import PATHS, Endpoint, ask, error_message
from jaxspec.bench.report import Report, Sample, summarise
from jaxspec.bench.scrape import Scraper
from jaxspec.bench.slo_mix import SloMix
from jaxspec.errors import explained
from jaxspec.progress import progress
from jaxspec.sched.sim import arrivals as arrival_times


@dataclass(frozen=True, slots=True)
class Job:
    """A request to send `at` seconds after the start of the run."""

    at: float
    prompt: str
    max_tokens: int
    #: Request category, with `--slo-mix`.
    category: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("server")
    where.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL",
        help="URL of the server, with or without /v1 (default: %(default)s)",
    )  # fmt: skip
    where.add_argument(
        "--endpoint", choices=tuple(PATHS), default="chat", help="API route to measure (default: %(default)s)"
    )
    where.add_argument("--model", help="model name in the requests (default: the first in /v1/models)")
    where.add_argument("--api-key", metavar="KEY", help="API key of the server (default: $OPENAI_API_KEY)")
    where.add_argument(
        "--extra-body", default="{}", metavar="JSON",
        help='further fields of every request body, such as \'{"slo": {"tpot_ms": 50}}\'',
    )  # fmt: skip
    timeout = "a request fails if nothing is received for this long"
    options.add_numbers(where, ("--timeout SECONDS", 300.0, timeout))
    when = parser.add_argument_group("arrivals")
    when.add_argument(
        "--request-rate", type=options.positive, metavar="R",
        help="mean requests per second; with --trace, rescales its arrival times (default: all at once)",
    )  # fmt: skip
    when.add_argument("--burstiness", type=float, default=1.0, metavar="CV", help=options.BURSTINESS_HELP)
    when.add_argument("--trace", metavar="FILE", help=options.TRACE_HELP)
    when.add_argument(
        "--concurrency", type=options.count, metavar="N",
        help="maximum number of requests in flight; further ones wait in the load generator (default: no limit)",
    )  # fmt: skip
    when.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="warm-up requests before the measurement (default: 1)"
    )
    results = options.add_workload(parser)
    results.add_argument(
        "--json-format", choices=("jaxspec", "vllm"), default="jaxspec",
        help="vllm: the keys of `vllm bench serve --save-result --save-detailed`; printed if there is no --json "
        "(default: %(default)s)",
    )  # fmt: skip
    slo_mix.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Run the load test. Failed requests are counted in the report. Raises `BenchError` if nothing can be measured."""
    mix = SloMix.of(args)
    jobs = plan(args, np.random.default_rng(args.seed), mix)
    return asyncio.run(_run(args, jobs, mix))


def plan(args: argparse.Namespace, rng: np.random.Generator, mix: SloMix | None = None) -> list[Job]:
    """The requests to send, in order of time. All random numbers of a run are drawn here. Raises `BenchError`."""
    try:
        texts = prompts.load(args.prompts) if args.prompts else list(prompts.PROMPTS)
        if args.trace:
            arrivals = arrival_times.trace(args.trace, args.num_prompts, args.request_rate)
        elif args.request_rate and math.isfinite(args.request_rate):
            arrivals = arrival_times.gamma(args.num_prompts, args.request_rate, args.burstiness, rng)
        else:
            arrivals = arrival_times.burst(args.num_prompts)
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    if mix:
        mixed = mix.requests(texts, len(arrivals), rng)
        return [Job(a.time, text, args.max_tokens, name) for a, (name, text) in zip(arrivals, mixed, strict=True)]
    jobs = []
    for text, arrival in zip(prompts.choose(texts, len(arrivals), rng), arrivals, strict=True):
        length = arrival.input_tokens
        if length is None and args.input_tokens:
            length = int(rng.integers(args.input_tokens[0], args.input_tokens[1] + 1))
        if length is not None:
            text = prompts.of_words(texts, prompts.words(length), int(rng.integers(len(texts))))
        jobs.append(Job(arrival.time, text, arrival.output_tokens or args.max_tokens))
    return jobs


async def _run(args: argparse.Namespace, jobs: Sequence[Job], mix: SloMix | None) -> Report:
    url = args.base_url.rstrip("/").removesuffix("/v1")
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(args.timeout, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits) as http:
        fields = {"temperature": args.temperature, **({"ignore_eos": True} if args.ignore_eos else {}), **_extra(args)}
        if mix and "slo" in fields:
            raise BenchError("--extra-body: slo cannot be combined with --slo-mix, which sets it")
        endpoint = Endpoint(url, await find_model(http, url, args.model), args.endpoint, fields)
        for job in jobs[: args.warmup]:
            sample = await ask(http, endpoint, job.prompt, min(job.max_tokens, 8))
            if sample.error:
                raise BenchError(f"the warm-up request failed: {sample.error}")
        tpot_targets = await mix.targets(http, endpoint) if mix else {}

        async def send(job: Job) -> Sample:
            to = endpoint
            if job.category:
                to = replace(endpoint, fields={**fields, "slo": {"tpot_ms": tpot_targets[job.category]}})
            pieces: list[str] = []
            sample = await ask(http, to, job.prompt, job.max_tokens, pieces)
            if args.json_format == "vllm":
                sample.text = "".join(pieces)
            sample.category = job.category
            return sample

        scraper = Scraper(http, url)
        await scraper.begin()
        with progress("requests", len(jobs)) as advance:
            samples, duration, lag = await drive(jobs, send, args.concurrency, advance)
        metrics = await scraper.end()
    report = summarise("serve", samples, duration, options=options.plain(args), slo=options.slo(args))
    report.extra = {"model": endpoint.model, "generator_lag_ms": lag * 1e3, "server": metrics}
    add_server_numbers(report, metrics)
    if mix:
        mix.add_results(report, tpot_targets)
    return report


async def drive(
    jobs: Sequence[Job],
    send: Callable[[Job], Awaitable[Sample]],
    concurrency: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> tuple[list[Sample], float, float]:
    """Send every job at its time. Returns the samples in the jobs' order, the duration and the load generator's maximum
    lag behind the schedule, in seconds.

    `Sample.start` becomes relative to the start of the run. With `concurrency`, jobs beyond the limit wait here; their
    latencies count from when they are sent.
    """
    limit = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
    begin = time.perf_counter()

    async def one(job: Job) -> Sample:
        async with limit:
            sample = await send(job)
        sample.start -= begin
        advance()
        return sample

    tasks: list[asyncio.Task[Sample]] = []
    lag = 0.0
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            if (wait := begin + job.at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            lag = max(lag, time.perf_counter() - begin - job.at)
            tasks.append(group.create_task(one(job)))
    return [task.result() for task in tasks], time.perf_counter() - begin, lag


async def find_model(http: httpx.AsyncClient, url: str, wanted: str | None) -> str:
    """The model name to send: `wanted`, or the server's first. Also checks the connection. Raises `BenchError`."""
    try:
        response = await http.get(url + "/v1/models")
    except httpx.InvalidURL as error:
        raise BenchError(f"{url} is not a URL: {error}") from None
    except httpx.HTTPError as error:
        raise BenchError(f"cannot reach {url}: {error or type(error).__name__}") from None
    if wanted:
        return wanted
    if response.status_code != 200:
        raise BenchError(f"{url}/v1/models returned HTTP {response.status_code}: {error_message(response.content)}")
    try:
        return response.json()["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise BenchError(f"{url}/v1/models lists no model; set --model") from None


def add_server_numbers(report: Report, metrics: dict[str, dict[str, Any]]) -> None:
    """Fill the report's fields that only the server's metrics have.

    Ratios cover the server's lifetime, counters only the run.
    """

    def value(name: str) -> float | None:
        counters, gauges = metrics.get("counters", {}), metrics.get("gauges", {})
        for prefix in ("jaxspec:", "vllm:"):
            if prefix + name in counters:
                return counters[prefix + name]
            if prefix + name in gauges:
                return gauges[prefix + name]["last"]
        return None

    report.padding_fraction = value("kv_positions_padded_ratio")
    report.token_padding_fraction = value("step_tokens_padded_ratio")
    report.host_overhead_fraction = value("host_overhead_ratio")
    if (compiled := value("compilations_after_warmup_total")) is not None:
        report.compilations_after_warmup = int(compiled)
    predicting, stepping = value("length_prediction_seconds_total"), value("step_seconds_total")
    if predicting and stepping:
        report.extra["prediction_seconds_per_step_second"] = predicting / stepping
    drafts, drafted = value("spec_decode_num_drafts_total"), value("spec_decode_num_draft_tokens_total")
    accepted = value("spec_decode_num_accepted_tokens_total")
    if drafted and accepted is not None:
        report.acceptance_rate = accepted / drafted
    if drafts and accepted is not None:
        report.mean_accepted_length = 1 + accepted / drafts


def _extra(args: argparse.Namespace) -> dict[str, Any]:
    try:
        fields = json.loads(args.extra_body)
    except ValueError as error:
        raise BenchError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BenchError("--extra-body must be a JSON object")
    return fields
