"""An engine elsewhere answers later: what it refuses has the status that it would have had at once."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from helpers.fakes import FakeEngine
from helpers.patience import PATIENCE
from helpers.serving import error_of, serving
from jaxspec.errors import EngineDead, EngineDraining, InvalidRequest
from jaxspec.outputs import OutputDelta
from jaxspec.sched.admission import SloRefused
from jaxspec.sched.scheduler import QueueFull


class LateEngine(FakeEngine):
    """Refuses every request in another thread, for `reason`."""

    reason: Exception

    def submit(self, prompt_ids: Any, params: Any, on_output: Any, *, request_id: Any = None, **_: Any) -> str:
        delta = OutputDelta(request_id, "", (), finish_reason="error", error=str(self.reason), refused=self.reason)
        threading.Timer(0.02, on_output, [delta]).start()
        return request_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "code", "param"),
    [
        (QueueFull("all replicas are busy"), 429, "queue_full", None),
        (SloRefused("no replica can"), 429, "slo_unattainable", "slo"),
        (InvalidRequest("slo.tpot_ms", "impossible"), 400, "invalid_value", "slo.tpot_ms"),
        (EngineDraining("stopping"), 503, "draining", None),
        (EngineDead("no replica is running"), 503, "engine_dead", None),
    ],
)
def test_late_refusals(reason: Exception, status: int, code: str, param: str | None, stream: bool) -> None:
    engine = LateEngine()
    engine.reason = reason
    engine.start()
    try:
        with serving(engine) as url:
            body = {"prompt": "x", "stream": stream, "max_tokens": 4}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
            assert answer.status_code == status
            error = error_of(answer)
            assert (error["code"], error["param"]) == (code, param) and str(reason) in error["message"] + "stopping"
            assert ("retry-after" in answer.headers) == (status == 429)
    finally:
        engine.shutdown()
