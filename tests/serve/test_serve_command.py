"""The command line and the signals of `python -m jaxspec.serve`, without a model."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jax
import pytest

from helpers import checkpoints
from helpers.fakes import RECITED
from helpers.paths import TESTS
from helpers.patience import PATIENCE
from helpers.serving import eventually
from jaxspec.config import EngineConfig
from jaxspec.serve.__main__ import _overrides, _parser, main

BAD = [
    (["--port", "x"], "--port"),
    (["--port", "65536"], "--port"),
    (["--bogus"], "--bogus"),
    (["word"], "the model is an option, --model"),
    (["--block-size", "16"], "unknown option --block-size; use --set page_size=VALUE"),
    (["--max-num-seq=3"], "unknown option --max-num-seq; use --max-num-seqs"),
    (["--kv-dtype", "int8"], "use --kv-cache-dtype"),
    (["--mem-fraction-static", "0.9"], "use --gpu-memory-utilization"),
    (["--gpu-memory-utilization", "1.1"], "gpu_memory_utilization"),
    (["--gpu-memory-utilization", "0"], "gpu_memory_utilization"),
    (["--set", "foo"], "key=value"),
    (["--set", "foo=1"], "foo"),
    (["--set", "max_num_seqs=many"], "max_num_seqs"),
    (["--max-queued-requests", "0"], "max_queued_requests"),
    (["--max-body-mb", "0"], "--max-body-mb"),
    (["--drain-timeout", "nan"], "--drain-timeout"),
    (["--swap-space", "-1"], "swap_space"),
    (["--swap-space", "1e6"], "swap_space"),
    (["--swap-space", "0", "--set", "memory=swap"], "swap_space"),
    (["--set", "kv_cache_dtype=int4"], "kv_cache_dtype"),
    (["--api-key", ""], "--api-key"),
    (["--log-level", "loud"], "--log-level"),
    (["--config", "/no/such.yaml"], "/no/such.yaml"),
    (["--enable-prefix-caching", "true"], "true"),  # a flag, as in vLLM
    (["--draft", "ngram", "--draft", "ngram"], "draft: a drafter is named twice"),
    (["--draft", ""], "draft: "),
    (["--set", "path=x"], "'path'"),
    (["--model", "/no/such.gguf", "--port", "0"], "/no/such.gguf"),
]


@pytest.mark.parametrize(("argv", "word"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_gets_one_line(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert word in line


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        ("some-model", "'some-model'"),
        ("truncated:2", "between 1 and 1 layers"),
        ("truncated:", "truncated:K"),
        ("/no/such.safetensors", "/no/such.safetensors"),
        ("{folder}/model.safetensors", "not a drafter"),
    ],
)
def test_a_drafter_that_does_not_fit_gets_one_line(
    tmp_path: Path, drafter: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = checkpoints.config()
    folder = checkpoints.write_hf(tmp_path / "tiny", sizes, [checkpoints.hf_tensors(sizes)])
    with pytest.raises(SystemExit) as left:
        main(["--model", str(folder), "--draft", drafter.format(folder=folder), "--port", "0"])
    assert left.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "error: draft: " in line
    assert reason in line


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "(no reason given)"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.\n---"),
            "allocating 5 bytes)",
        ),
    ],
)
def test_too_little_memory_gets_one_line(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("jaxspec.engine.engine.Engine", fail)
    with pytest.raises(SystemExit) as left:
        main(["--port", "0"])
    line = capsys.readouterr().err
    assert left.value.code == 2 and line.count("\n") == 1
    assert "error: not enough memory" in line and reason in line and "kv_cache_tokens" in line


def test_a_port_in_use_shows_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as left:
            main(["--port", str(port)])
    assert left.value.code == 2
    assert str(port) in capsys.readouterr().err


PROGRAM = """
from helpers.fakes import FakeEngine
from jaxspec.serve.app import ServerOptions
from jaxspec.serve.run import bind, serve
engine = FakeEngine(step=%g, max_model_len=100_000)
engine.start()
try:
    code = serve(engine, bind("127.0.0.1", 0), ServerOptions(), drain_timeout=%g)
finally:
    engine.shutdown()
raise SystemExit(code)
"""


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process with the fake engine, and its URL. The parameter is its drain timeout, or (seconds of a step,
    drain timeout)."""
    step, drain = request.param if isinstance(request.param, tuple) else (0.01, request.param)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM % (step, drain)], cwd=TESTS, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            greeting = process.stdout.readline()
            assert "fake at http://127.0.0.1:" in greeting
            shown = [process.stdout.readline() for _ in range(4)]  # the engine's summary, and a request to try
            assert shown[0] == "  model:            fake\n" and "curl" in shown[-1]
            yield process, greeting.split(" at ")[1].split()[0]
        finally:
            process.kill()


@pytest.mark.parametrize("started", [20], indirect=True)
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(started: tuple[subprocess.Popen[str], str], sig: signal.Signals) -> None:
    process, url = started
    body = {"prompt": "x", "max_tokens": 100, "stream": True}
    with httpx.Client(base_url=url, timeout=PATIENCE) as http, ThreadPoolExecutor() as pool:
        stream = pool.submit(http.post, "/v1/completions", json=body)
        eventually(lambda: 'num_requests_running{model_name="fake"} 1.0' in http.get("/metrics").text)
        process.send_signal(sig)
        eventually(lambda: http.get("/health").status_code == 503)
        assert http.post("/v1/completions", json=body).status_code == 503
        assert stream.result().text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in stream.result().text
    assert process.wait(timeout=PATIENCE) == 0


@pytest.mark.parametrize("started", [0.3], indirect=True)
def test_draining_has_an_end(started: tuple[subprocess.Popen[str], str]) -> None:
    process, url = started
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 50_000, "stream": True}) as r:
        events = r.iter_lines()
        assert RECITED[0] in next(events)
        process.send_signal(signal.SIGTERM)
        assert any('"code":"aborted"' in event for event in events)
    assert process.wait(timeout=PATIENCE) == 0


def cut(url: str) -> bool:
    """Asks for more than is ever written; -> whether the connection was closed before the answer's end."""
    body = {"prompt": "x", "max_tokens": 50_000, "stream": True}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as response:
            return not any(line == "data: [DONE]" for line in response.iter_lines())
    except httpx.TransportError:
        return True


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("started", [60], indirect=True)
def test_the_second_signal_ends_all_at_once(started: tuple[subprocess.Popen[str], str], sig: signal.Signals) -> None:
    process, url = started
    with ThreadPoolExecutor(9) as pool:
        streams = [pool.submit(cut, url) for _ in range(9)]
        eventually(lambda: 'num_requests_running{model_name="fake"} 9.0' in httpx.get(f"{url}/metrics").text)
        process.send_signal(sig)
        eventually(lambda: httpx.get(f"{url}/health").status_code == 503)
        process.send_signal(sig)
        said = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 128 + sig
        assert all(stream.result() for stream in streams)
    again = "Ctrl-C again" if sig == signal.SIGINT else "a second signal"
    assert said == f"shutting down: waiting up to 60 s for 9 requests; {again} stops at once\n"


@pytest.mark.parametrize("started", [(600, 60)], indirect=True)
def test_the_second_signal_does_not_wait_for_a_long_step(started: tuple[subprocess.Popen[str], str]) -> None:
    process, url = started
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(cut, url)
        eventually(lambda: 'num_requests_running{model_name="fake"} 1.0' in httpx.get(f"{url}/metrics").text)
        process.send_signal(signal.SIGINT)
        eventually(lambda: httpx.get(f"{url}/health").status_code == 503)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE)[1]
        assert (process.returncode, said.count("\n")) == (130, 1)
        assert stream.result()


def test_settings_with_an_option_of_their_own() -> None:
    argv = "--max-num-seqs 3 --no-enable-prefix-caching --served-model-name 7 --set max_num_seqs=5 --swap-space 0.5"
    config = EngineConfig.load(None, **_overrides(vars(_parser().parse_args(argv.split()))))
    assert (config.max_num_seqs, config.enable_prefix_caching) == (3, False)
    assert (config.served_model_name, config.swap_space) == (["7"], 0.5)
