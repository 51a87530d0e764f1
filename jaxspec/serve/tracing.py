"""OpenTelemetry traces: one span for each output of a request, with vLLM's attributes, sent over OTLP/HTTP.

Only a server that is asked for traces imports this module, since it needs the extra `otel`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from threading import Thread
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.histograms import between
from jaxspec.version import __version__

log = logging.getLogger(__name__)

#: Path of traces in OTLP/HTTP.
_PATH = "/v1/traces"
#: Seconds for the last spans.
_LAST = 5.0


class Traces:
    """Sends spans to a collector, in batches and from a thread of its own.

    `endpoint`: its URL; without a path, OTLP's is added. The SDK's own variables, such as OTEL_SERVICE_NAME,
    OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS, apply.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        url = urlsplit(endpoint)
        exporter = OTLPSpanExporter(urlunsplit(url._replace(path=_PATH)) if url.path in ("", "/") else endpoint)
        about = {SERVICE_VERSION: __version__}
        given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in given:
            about[SERVICE_NAME] = "jaxspec"
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxspec", __version__)
        self._model = model

    def begin(self, request_id: str, params: SamplingParams, headers: Mapping[str, str]) -> Span:
        """The span of an output that the engine has taken. Its parent is the trace of the request's `headers`
        (traceparent and tracestate), if they name one."""
        attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.model": self._model,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        parent = TraceContextTextMapPropagator().extract(headers)
        return self._tracer.start_span("llm_request", parent, SpanKind.SERVER, attributes)

    def end(self, span: Span, last: OutputDelta) -> None:
        """End a span with the output's last delta."""
        if last.finish_reason is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [last.finish_reason])
        if last.finish_reason in ("error", "abort"):
            span.set_status(StatusCode.ERROR, last.error)
        if last.metrics is not None:
            span.set_attributes(_measured(last.metrics))
        span.end()

    def close(self) -> None:
        """Send what is left, and stop. Blocks, for a few seconds if the collector does not answer."""
        ending = Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_LAST)
        if ending.is_alive():
            log.warning("the last spans were not sent: the collector does not answer")


def _measured(m: RequestMetrics) -> dict[str, float]:
    """Counts, and times in seconds that were measured."""
    values = {
        "gen_ai.usage.prompt_tokens": m.prompt_tokens,
        "gen_ai.usage.completion_tokens": m.output_tokens,
        "gen_ai.latency.time_in_queue": between(m.arrival, m.first_scheduled),
        "gen_ai.latency.time_to_first_token": m.ttft,
        "gen_ai.latency.time_in_model_prefill": between(m.first_scheduled, m.first_token),
        "gen_ai.latency.time_in_model_decode": between(m.first_token, m.finished),
        "gen_ai.latency.time_in_model_inference": between(m.first_scheduled, m.finished),
        "gen_ai.latency.e2e": m.e2e,
        "jaxspec.cached_tokens": m.cached_tokens,
        "jaxspec.predicted_tokens": m.predicted_tokens,
        "jaxspec.preemptions": m.preemptions,
        "jaxspec.draft_tokens": m.speculation.proposed,
        "jaxspec.accepted_draft_tokens": m.speculation.accepted,
    }
    return {name: value for name, value in values.items() if value is not None}
