"""OpenTelemetry traces: spans of requests as a collector gets them, over HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from helpers.fakes import FakeEngine
from helpers.patience import PATIENCE
from helpers.serving import eventually, serving
from jaxspec.serve import __main__ as command
from jaxspec.serve.app import ServerOptions

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[SimpleNamespace]:
    """A collector that keeps what it is sent: `paths`, and `requests` once decoded."""
    got = SimpleNamespace(url="", paths=[], requests=[])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.paths.append(self.path)
            got.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    got.url = f"http://127.0.0.1:{server.server_port}"
    yield got
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(draft=["ngram"], predicted=9.0)
    engine.start()
    yield engine
    engine.shutdown()


def spans_of(collector: SimpleNamespace) -> list[Any]:
    return [
        s for r in collector.requests for about in r.resource_spans for scope in about.scope_spans for s in scope.spans
    ]


def attributes_of(holder: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in holder.attributes}


def test_each_output_is_a_span_in_the_trace_of_its_request(engine: FakeEngine, collector: SimpleNamespace) -> None:
    body = {"prompt": "abc", "max_tokens": 7, "n": 2, "temperature": 0.5, "top_p": 0.9}
    with serving(engine, ServerOptions(traces_endpoint=collector.url)) as url:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE).raise_for_status()
        httpx.post(
            f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, timeout=PATIENCE
        )
    # Once the server has stopped, all have been sent.
    assert set(collector.paths) == {"/v1/traces"}
    (about,) = {
        r.resource_spans[0].resource.SerializeToString(): r.resource_spans[0].resource for r in collector.requests
    }.values()
    assert attributes_of(about)["service.name"] == "jaxspec"
    *pair, alone = sorted(spans_of(collector), key=lambda span: span.start_time_unix_nano)
    assert len(pair) == 2 and alone.trace_id.hex() != TRACE and not alone.parent_span_id
    ids = set()
    for span in pair:
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
        found = attributes_of(span)
        ids.add(found["gen_ai.request.id"])
        assert found["gen_ai.usage.prompt_tokens"] == 3 and found["gen_ai.usage.completion_tokens"] == 7
        assert (found["gen_ai.request.n"], found["gen_ai.request.max_tokens"]) == (2, 7)
        assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.9)
        assert found["gen_ai.response.model"] == "fake"
        assert 0 <= found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
        assert found["jaxspec.predicted_tokens"] == 9
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        assert span.status.code == 0
    assert ids == {f"{answer.json()['id']}-{i}" for i in range(2)}


def test_a_cancelled_request_is_an_error(collector: SimpleNamespace) -> None:
    slow = FakeEngine(step=0.05)
    slow.start()
    with serving(slow, ServerOptions(traces_endpoint=f"{collector.url}/other")) as url:
        body = {"prompt": "x", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            next(answer.iter_lines())
        eventually(lambda: not slow.stats().running)
    slow.shutdown()
    (span,) = spans_of(collector)
    assert collector.paths == ["/other"] and span.status.code == 2


def test_without_the_extra_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "jaxspec.serve.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(SystemExit):
        command.main(["--otlp-traces-endpoint", "http://localhost:4318", "--port", "0"])
    line = capsys.readouterr().err
    assert '".[otel]"' in line and line.count("\n") == 1


@pytest.mark.parametrize("text", ["localhost:4318", "grpc://localhost:4317", "http://", ""])
def test_the_endpoint_must_be_a_url(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--otlp-traces-endpoint", text])
    assert "--otlp-traces-endpoint: must be a URL with http" in capsys.readouterr().err


def test_a_server_without_traces_imports_nothing_of_it() -> None:
    script = "import sys, jaxspec.serve.app, jaxspec.serve.run; assert 'opentelemetry.sdk' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
