"""Recordings of the real engine (on the tiny model), replayed on the simulator: the same plans, the same orders."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from helpers import tiny
from helpers.replay import Replay, completed, first_served
from jaxspec import SamplingParams
from jaxspec.bench.record import drive, took
from jaxspec.sched import PagePool, Scheduler
from jaxspec.sched.sim.cost import Profiled
from jaxspec.sched.sim.recording import Recorder, Recording

SMALL: dict[str, Any] = dict(
    compilation_cache_dir="", kv_cache_tokens=256, max_model_len=96, max_num_batched_tokens=16, max_num_seqs=3,
    page_size=16, token_buckets=[16], enable_prefix_caching=False,
)  # fmt: skip


def record(requests: int = 14, seed: int = 0, **settings: Any) -> tuple[Recording, Scheduler]:
    """Requests of mixed sizes, arriving while others run; and a scheduler as the engine's was, to replay with."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 250, int(n)).tolist() for n in rng.integers(3, 40, requests)]
    params = [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in rng.integers(2, 40, requests)]
    with tiny.llm(**SMALL | settings) as llm:
        scheduler = llm.engine.loop.scheduler
        recorder = Recorder(scheduler)
        drive(llm.engine, np.sort(rng.uniform(0, 0.08, requests)).tolist(), prompts, params)
        recording = recorder.stop()
    pool = PagePool(scheduler.pool.num_pages, scheduler.pool.page_size, enable_prefix_caching=False)
    return recording, Scheduler(scheduler.config, pool)


PRESETS: dict[str, dict[str, Any]] = {
    "fcfs": {"draft": []},
    "fcfs, short of pages": {"draft": [], "kv_cache_tokens": 112},
    "drafting": {"draft": ["ngram"], "tree": "chain", "draft_depth": 3},
    "sjf, dynamic": {"order": "sjf", "predictor": "noisy_oracle", "batching": "dynamic", "max_batch_size": 3},
    "las": {"draft": [], "order": "las", "las": {"quantum_ms": 2}, "max_num_seqs": 1},
    "laps_sd": {
        "order": "laps_sd",
        "predictor": "oracle",
        "laps_sd": {"first_threshold_ms": 10, "tolerance": 0.3},
        "tree": "chain",
        "max_num_seqs": 1,
        "draft_depth": 3,
    },
}


def test_a_recording_of_steps_that_overlap() -> None:
    """Each step has its own load and end, although the next is planned before."""
    alone, _ = record(requests=1, draft=[])
    ahead, _ = record(requests=1, draft=[], async_scheduling=True)
    loads = [step.load for step in alone.steps]
    assert [step.load for step in ahead.steps[: len(loads)]] == loads
    ends = [step.ended for step in ahead.steps[: len(loads)]]
    assert ends == sorted(ends) and ends[0] > 0 and all(step.service > 0 for step in ahead.steps[: len(loads)])
    assert ahead.requests[0].output == alone.requests[0].output
    spans = [(step.ended - seconds, step.ended) for step, seconds in zip(ahead.steps, took(ahead), strict=True)]
    assert all(begun >= before for (_, before), (begun, _) in pairwise(spans)), "no time counts for two steps"
    assert all(step.ended > 0 and step.load.tokens for step in ahead.steps), "none is still under way"


def test_the_load_of_steps_that_were_planned_before_it_was_known() -> None:
    """Without other requests, a step reads the KV of all earlier tokens, accepted drafts included."""
    draft: dict[str, Any] = dict(draft=["truncated:1"], tree="chain", draft_depth=3)
    ahead, _ = record(requests=1, async_scheduling=True, **draft)
    (seen,) = ahead.requests
    context, contexts = seen.input, list[int]()
    for proposed, accepted in seen.rounds:  # none are proposed as long as the drafter has not read the prompt
        contexts += [context] if proposed else []
        context += 1 + accepted
    assert [step.load.context for step in ahead.steps if step.load.drafting] == contexts
    assert len(contexts) > 5 and sum(accepted for _, accepted in seen.rounds) > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_the_simulator_does_what_the_engine_did(preset):
    recording, scheduler = record(**PRESETS[preset])
    replay = Replay(scheduler, recording)
    served = replay.run()
    assert [step.scheduled for step in recording.steps] == replay.scheduled

    # The same order of first service and of completion; those of one step are in its plan's order.
    order = {i: at for at, i in enumerate(first_served(recording))}
    assert sorted(order, key=lambda i: (served.first_scheduled[i], order[i])) == first_served(recording)
    order = {i: at for at, i in enumerate(completed(recording))}
    assert sorted(order, key=lambda i: (served.finished[i], order[i])) == completed(recording)
    assert len(order) == len(recording.requests) == 14
    if preset == "fcfs, short of pages":
        assert served.preemptions.sum() > 0
    if preset in ("las", "laps_sd"):
        assert served.pauses > 0
    if preset == "drafting":
        assert served.drafted.sum() == sum(d for r in recording.requests for d, _ in r.rounds) > 0


def test_another_policy_is_not_taken_for_the_recorded_one():
    recording, scheduler = record(draft=[])
    recording.requests[0].output -= 1
    with pytest.raises(ValueError, match="step "):
        Replay(scheduler, recording).run()


def test_recordings_survive_a_file(tmp_path):
    recording, _ = record(requests=3, draft=["ngram"], tree="chain", draft_depth=3)
    recording.save(tmp_path / "r.json")
    assert Recording.read(tmp_path / "r.json") == recording
    for text in ("{}", "[]", '{"steps": [], "requests": [{"rounds": 3}]}', "nothing"):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ValueError, match="no recording"):
            Recording.read(tmp_path / "r.json")


def test_a_profile_tells_the_times_it_was_made_from():
    recording, _ = record(draft=[])
    seconds, loads = took(recording), [step.load for step in recording.steps]
    profile = Profiled.fit(loads, seconds, [16], "tiny")
    guessed = [profile.seconds(load) for load in loads]
    low, high = np.percentile(seconds, [5, 95])  # the machine has other work too
    assert low < np.median(guessed) < high
    assert all(load.tokens <= 16 for load in loads)
