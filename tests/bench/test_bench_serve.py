"""The load generator against a small fake server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import chain

import httpx
import pytest

from helpers.fake_server import GAP_S, TOKENS, FakeServer, running
from jaxspec.bench.__main__ import main
from jaxspec.bench.client import Endpoint, _text, ask
from jaxspec.bench.report import Sample, summarise
from jaxspec.bench.serve import Job, drive
from jaxspec.bench.vllm_json import as_vllm


@pytest.fixture(scope="module")
def fake() -> Iterator[tuple[FakeServer, str]]:
    server = FakeServer()
    with running(server.app) as url:
        yield server, url


def measured(url: str, prompt: str, **kw) -> Sample:
    async def once() -> Sample:
        async with httpx.AsyncClient() as http:
            return await ask(http, Endpoint(url, "fake", **kw), prompt, 16)

    return asyncio.run(once())


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_streamed_answer_is_timed(fake, route):
    server, url = fake
    sample = measured(url, "one two three", route=route, fields={"ignore_eos": True})
    assert sample.error is None and sample.finish_reason == "length"
    assert (sample.input_tokens, sample.output_tokens, len(sample.itl)) == (3, TOKENS, TOKENS - 1)
    assert sample.ttft is not None and sample.tpot is not None and sample.e2e is not None
    assert sample.ttft >= GAP_S * 0.9 and sample.tpot >= GAP_S * 0.9
    assert sample.e2e == pytest.approx(sample.ttft + sum(sample.itl), abs=1e-6)
    assert server.bodies[-1] | {"ignore_eos": True, "stream": True, "max_tokens": 16} == server.bodies[-1]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [("refuse", "HTTP 429: the queue is full"), ("break", "without a finish"), ("garble", "not an OpenAI stream")],
)
def test_a_failed_answer_says_why(fake, prompt, says):
    sample = measured(fake[1], prompt)
    assert sample.error and says in sample.error and sample.ttft is None


def test_concurrency_is_limited_and_order_kept():
    running = most = 0

    async def send(job: Job) -> Sample:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (5 - job.max_tokens % 5))
        running -= 1
        return Sample(start=time.perf_counter(), output_tokens=job.max_tokens)

    jobs = [Job(0.0, "", i) for i in range(20)]
    samples, duration, _ = asyncio.run(drive(jobs, send, concurrency=3))
    assert most == 3 and [s.output_tokens for s in samples] == list(range(20)) and duration > 0


def test_jobs_are_sent_when_they_arrive():
    async def send(_: Job) -> Sample:
        return Sample(start=time.perf_counter())

    jobs = [Job(t, "", 1) for t in (0.0, 0.05, 0.1)]
    samples, _, lag = asyncio.run(drive(jobs, send))
    for job, sample in zip(jobs, samples, strict=True):
        assert job.at <= sample.start <= job.at + lag + 0.05


def test_serve_writes_a_report(fake, tmp_path, capsys):
    server, url = fake
    file = tmp_path / "new" / "report.json"
    before = len(server.bodies)
    options = {
        "--base-url": url + "/v1/",
        "--num-prompts": "5",
        "--request-rate": "50",
        "--burstiness": "2",
        "--input-tokens": "8",
        "--max-tokens": "7",
        "--slo-tpot-ms": "1000",
        "--extra-body": '{"priority": 2}',
        "--api-key": "very-secret",
        "--json": str(file),
    }
    code = main(["serve", *chain.from_iterable(options.items())])
    assert code == 0 and "output tokens/s" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert (report["completed"], report["failed"], report["output_tokens"]) == (5, 0, 5 * TOKENS)
    assert report["slo_attainment"] == 1 and report["goodput_tokens_per_s"] == report["output_tokens_per_s"]
    assert (report["acceptance_rate"], report["mean_accepted_length"]) == (0.25, 2.0)
    assert report["extra"]["server"]["gauges"] == {"jaxspec:kv_cache_usage_perc": {"last": 0.25, "max": 0.25}}
    assert report["extra"]["server"]["means"] == {"jaxspec:request_queue_time_seconds": 0.5}
    assert len(report["samples"]) == 5 and "very-secret" not in file.read_text()
    sent = server.bodies[before + 1 :]
    assert [(b["priority"], b["max_tokens"], len(b["messages"][0]["content"].split())) for b in sent] == [(2, 7, 6)] * 5


def test_serve_follows_a_trace(fake, tmp_path):
    server, url = fake
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,4,3\n0.01,8,5\n")
    before = len(server.bodies)
    assert main(["serve", "--base-url", url, "--trace", str(path), "--warmup", "0", "--endpoint", "completions"]) == 0
    assert [(len(b["prompt"].split()), b["max_tokens"]) for b in server.bodies[before:]] == [(3, 3), (6, 5)]


def test_serve_counts_failed_requests(fake, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["fine"]}\n{"turns": ["refuse this"]}\n')
    arguments = ["--prompts", str(path), "--num-prompts", "4", "--warmup", "0", "--concurrency", "2"]
    assert main(["serve", "--base-url", fake[1], *arguments]) == 1
    said = capsys.readouterr().out
    assert "2 completed, 2 failed" in said and "failed × 2: HTTP 429: the queue is full" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--base-url", "http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
        (["--base-url", "nowhere"], "nowhere"),
        (["--prompts", "/nonexistent.jsonl"], "nonexistent.jsonl"),
        (["--trace", "/nonexistent.csv"], "nonexistent.csv"),
        (["--extra-body", "{"], "--extra-body is not JSON"),
        (["--request-rate", "2", "--burstiness", "-1"], "burstiness"),
    ],
)
def test_serve_says_in_a_line_why_it_cannot_run(capsys, arguments, says):
    assert main(["serve", "--num-prompts", "2", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and "Traceback" not in said


def test_results_under_vllms_keys(fake, tmp_path, capsys):
    path, file = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    path.write_text('{"turns": ["a fine one"]}\n{"turns": ["refuse this"]}\n')
    arguments = [
        "serve", "--base-url", fake[1], "--prompts", str(path), "--num-prompts", "4", "--warmup", "0",
        "--request-rate", "100", "--burstiness", "2", "--concurrency", "3", "--slo-tpot-ms", "10000",
        "--json-format", "vllm",
    ]  # fmt: skip
    assert main([*arguments, "--json", str(file)]) == 1
    assert "output tokens/s" in capsys.readouterr().out  # the table
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"], result["num_prompts"]) == (2, 2, 4)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6, 2 * TOKENS)
    assert (result["model_id"], result["backend"], result["max_concurrency"]) == ("fake", "openai-chat", 3)
    assert (result["request_rate"], result["burstiness"]) == (100, 0.25)
    lists = [result[key] for key in ("input_lens", "output_lens", "ttfts", "itls", "latencies", "generated_texts")]
    assert sorted(zip(lists[0], lists[1], (len(gaps) for gaps in lists[3]), lists[5], strict=True)) == [
        (0, 0, 0, ""), (0, 0, 0, ""), (3, TOKENS, TOKENS - 1, "t0t1t2t3t4t5"), (3, TOKENS, TOKENS - 1, "t0t1t2t3t4t5")
    ]  # fmt: skip
    assert sorted(bool(error) for error in result["errors"]) == [False, False, True, True]
    done = [1000 * seconds for seconds in result["ttfts"] if seconds]
    assert result["mean_ttft_ms"] == result["median_ttft_ms"] == pytest.approx(sum(done) / 2)
    assert result["std_ttft_ms"] == pytest.approx(abs(done[0] - done[1]) / 2)
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert result[f"p99_{name}_ms"] >= result[f"median_{name}_ms"] > 0
    assert result["request_throughput"] == pytest.approx(2 / result["duration"]) == result["request_goodput"]
    assert result["total_token_throughput"] == pytest.approx((6 + 2 * TOKENS) / result["duration"])
    assert (result["spec_decode_acceptance_rate"], result["spec_decode_acceptance_length"]) == (25, 2)
    assert result["spec_decode_per_position_acceptance_rates"] == [1]

    assert main(arguments) == 1
    assert json.loads(capsys.readouterr().out).keys() == result.keys()


def test_an_empty_run_under_vllms_keys():
    report = summarise("serve", [], 0.0, options={})
    result = as_vllm(report)
    assert (result["mean_ttft_ms"], result["request_rate"], result["burstiness"]) == (0, "inf", 1)
    assert result["request_goodput"] is None and "spec_decode_num_drafts" not in result
    assert json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"text": "a"}, "a"),
        ({"delta": {"role": "assistant", "content": ""}}, ""),
        ({"delta": {"content": "a"}}, "a"),
        ({"delta": {"reasoning": "a", "content": None}}, "a"),
        ({"delta": {"reasoning_content": "a"}}, "a"),
        ({"delta": {"reasoning": "a", "reasoning_content": "a"}}, "a"),
        ({"delta": {"tool_calls": [{"function": {"name": "f", "arguments": ""}}]}}, ""),
        ({"delta": {"tool_calls": [{"function": {"arguments": "{"}}, {"function": {"arguments": "}"}}]}}, "{}"),
        ({"delta": {"tool_calls": None}, "finish_reason": "tool_calls"}, ""),
    ],
)
def test_every_text_of_a_chunk_counts(choice, text):
    assert _text(choice) == text
