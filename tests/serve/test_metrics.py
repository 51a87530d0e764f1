"""`/metrics`: values of the fake engine's requests, vLLM's names, and what vLLM's own clients read."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from helpers.fakes import FakeEngine
from helpers.live_server import ask, metrics, started
from helpers.serving import eventually
from jaxspec.serve.metrics import IN_VLLM


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    """After one request with two outputs of seven tokens for each of two prompts, of 1 and 3 tokens."""
    with started(draft=["ngram"], max_model_len=512) as (engine, url):
        ask(url, "/v1/completions", {"prompt": ["x", "yyy"], "n": 2})
        eventually(lambda: metrics(url)["e2e_request_latency_seconds_count{}"] == 4)
        yield engine, url


def families(url: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)}


@pytest.mark.parametrize(
    ("name", "count", "total"),
    [
        ("request_prompt_tokens", 4, 8),
        ("request_prefill_kv_computed_tokens", 4, 8),
        ("request_generation_tokens", 4, 28),
        ("request_params_max_tokens", 4, 28),
        ("request_params_n", 2, 4),
        ("request_max_num_generation_tokens", 2, 14),
        ("request_num_preemptions", 4, 0),
        ("inter_token_latency_seconds", 24, None),
        ("request_time_per_output_token_seconds", 4, None),
        ("request_queue_time_seconds", 4, None),
        ("request_prefill_time_seconds", 4, 0),
        ("request_decode_time_seconds", 4, None),
        ("request_inference_time_seconds", 4, None),
    ],
)
def test_histograms(served: tuple[FakeEngine, str], name: str, count: int, total: float | None) -> None:
    values = metrics(served[1])
    assert values[f"{name}_count{{}}"] == count
    assert total is None or values[f"{name}_sum{{}}"] == total


def test_times_add_up(served: tuple[FakeEngine, str]) -> None:
    values = metrics(served[1])

    def total(name: str) -> float:
        return values[f"{name}_seconds_sum{{}}"]

    assert total("request_inference_time") == pytest.approx(
        total("request_prefill_time") + total("request_decode_time")
    )
    assert total("e2e_request_latency") == pytest.approx(total("request_queue_time") + total("request_inference_time"))
    assert total("request_decode_time") == pytest.approx(6 * total("request_time_per_output_token"))


def test_steps_are_counted(served: tuple[FakeEngine, str]) -> None:
    values = metrics(served[1])
    assert values["iteration_tokens_total_sum{}"] == values["generation_tokens_total{}"] == 28


def test_buckets_of_lengths_end_at_the_longest_request(served: tuple[FakeEngine, str]) -> None:
    bounds = [s.labels["le"] for s in families(served[1])["jaxspec:request_prompt_tokens"].samples if "le" in s.labels]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "+Inf"]


def test_vllms_names(served: tuple[FakeEngine, str]) -> None:
    """Every metric of `IN_VLLM` is there twice: with equal values, as vLLM's with the label `engine`."""
    found = families(served[1])
    assert {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")} == IN_VLLM
    for name in IN_VLLM:
        own, alias = found[f"jaxspec:{name}"], found[f"vllm:{name}"]
        assert (own.type, len(own.samples)) == (alias.type, len(alias.samples))
        for ours, theirs in zip(own.samples, alias.samples, strict=True):
            assert theirs.name == ours.name.replace("jaxspec:", "vllm:")
            assert theirs.labels == ours.labels | {"engine": "0"}
            assert theirs.value == ours.value


def test_lines_as_load_generators_and_autoscalers_read_them(served: tuple[FakeEngine, str]) -> None:
    lines = httpx.get(f"{served[1]}/metrics").text.splitlines()
    assert 'vllm:num_requests_waiting{engine="0",model_name="fake"} 0.0' in lines
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="fake"} 24.0' in lines
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="fake",position="1"} 8.0' in lines
    (cache,) = (line for line in lines if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="32"' in cache and 'num_gpu_blocks="1000"' in cache


def test_every_finish_reason_is_there_from_the_start(served: tuple[FakeEngine, str]) -> None:
    reasons = ("abort", "error", "length", "stop")
    counted = [metrics(served[1])[f'request_success_total{{finished_reason="{reason}"}}'] for reason in reasons]
    assert counted == [0, 0, 4, 0]


def test_a_failed_request_is_counted() -> None:
    with started(step=0.01, max_model_len=100_000) as (engine, url):
        body = {"prompt": "x", "stream": True, "max_tokens": 50_000}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            engine.fail()
            assert "engine_dead" in answer.read().decode()
        assert metrics(url)['request_success_total{finished_reason="error"}'] == 1


def test_the_process_is_there_and_creation_times_are_not(served: tuple[FakeEngine, str]) -> None:
    found = families(served[1])
    assert found["process_resident_memory_bytes"].samples[0].value > 1e6
    assert found["python_info"].samples[0].labels["implementation"] == "CPython"
    assert not [name for name in found if name.endswith("_created")]
