"""What must hold between two turns of an engine, whatever has happened to it."""

from __future__ import annotations

from jaxspec.engine.engine import Engine
from jaxspec.sched.kv.swap import Swap
from jaxspec.sched.request import RequestStatus


def check_books(engine: Engine) -> None:
    """Pages, host pages, penalty rows and states of requests balance. Raises `AssertionError`."""
    loop = engine.loop
    scheduler = loop.scheduler
    running, waiting = scheduler.running, list(scheduler.waiting)
    requests = [*running, *waiting]
    scheduler.pool.check([request.pages for request in requests])
    if isinstance(scheduler.kv, Swap):
        scheduler.kv.host.check([request.host_pages for request in requests])
    assert all(request.status is RequestStatus.RUNNING for request in running), "a running request is in another state"
    for request in waiting:
        expected = RequestStatus.WAITING
        if request.host_pages:
            expected = RequestStatus.SWAPPED
        elif request.pages:
            expected = RequestStatus.PAUSED
        assert request.status is expected, f"a waiting request is {request.status.value}, not {expected.value}"
    held = engine.config.max_num_seqs - loop.penalties.free
    assert 0 <= held <= sum(state.penalised for state in loop.unfinished), "penalty rows of requests that are gone"
    known = {state.request.id for state in loop.unfinished}
    assert {request.id for request in requests} <= known, "the scheduler has requests that no client waits for"
    if not loop.recovery.trying:
        assert len(known) == len(requests), "the scheduler lost a request"


def check_idle(engine: Engine) -> None:
    """Nothing is left of the requests that were served. Raises `AssertionError`."""
    stats, loop = engine.stats(), engine.loop
    left = {
        "running": stats.running, "waiting": stats.waiting, "KV pages": stats.kv_usage, "host pages": stats.host_usage,
        "penalty rows": engine.config.max_num_seqs - loop.penalties.free, "requests": len(loop.unfinished),
    }  # fmt: skip
    assert not any(left.values()), f"left over: {left}"
    loop.scheduler.pool.check([])
    assert stats.compilations_after_warmup == 0, f"{stats.compilations_after_warmup} compilations"
