"""Drives a scheduler as the engine does, with checks after each step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st

from helpers.paged import Device, Job, solo
from jaxspec.sched import Plan, PolicyConfig, Request, RequestStatus, Scheduler
from jaxspec.sched.plan import Lookahead
from jaxspec.sched.slo import Slo
from jaxspec.sched.timing import StepTimes

ORDERS = ("fcfs", "sjf", "pairwise", "priority", "las", "laps_sd", "alise")


PREEMPTIVE = ("priority", "las", "laps_sd", "alise")


PACES = ("none", "fcfs", "stta", "deadline")


#: A step takes a second with few tokens; targets are of a few steps, and some cannot be kept.
TIMES = StepTimes({n: 0.7 + 0.1 * n for n in range(1, 33)})


TARGETS = (Slo(), Slo(tpot=0.5), Slo(tpot=0.9), Slo(tpot=1.2, ttft=2.0), Slo(tpot=4.0), Slo(ttft=9.0))


@st.composite
def policies(draw: st.DrawFn, **fixed: Any) -> PolicyConfig:
    """Any choice for each slot, with thresholds of a few steps of a second."""
    order = fixed.get("order") or draw(st.sampled_from(ORDERS))
    modes = ("continuous", "none") if order in PREEMPTIVE else ("continuous", "none", "dynamic")
    few = st.integers(1, 6).map(lambda n: n * 1000.0)
    return PolicyConfig.model_validate(
        {
            "order": order,
            "predictor": draw(st.sampled_from(["none", "oracle", "noisy_oracle"])),
            "batching": draw(st.sampled_from(modes)),
            "max_batch_size": draw(st.integers(1, 4)),
            "batch_wait_timeout_ms": draw(few),
            "aging_ms": draw(st.one_of(st.none(), few)),
            "pairwise": {"error_rate": draw(st.sampled_from([0.0, 0.3, 1.0]))},
            "las": {"quantum_ms": draw(st.sampled_from([0.0, 1000.0, 3000.0]))},
            "laps_sd": {
                "queues": draw(st.integers(1, 5)),
                "growth": draw(st.sampled_from([1.5, 2.0, 4.0])),
                "first_threshold_ms": draw(few),
                "window": draw(st.integers(2, 4)),
                "tolerance": draw(st.sampled_from([0.01, 0.3, 2.0])),
                "unknown": draw(st.sampled_from(["fcfs", "typical"])),
            },
            "alise": {"queues": draw(st.integers(1, 6)), "first_threshold_ms": draw(few)},
            "pace": draw(st.sampled_from(PACES)),
            "prefill": draw(st.sampled_from(["mixed", "mixed", "first"])),
        }
        | fixed
    )


@dataclass
class Drive:
    """Steps a scheduler and a device through jobs and holds every plan against the promises."""

    device_kind: ClassVar[type[Device]] = Device

    scheduler: Scheduler
    jobs: list[Job]
    random: Random
    requests: dict[str, Request] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    log: list[Any] = field(default_factory=list)

    def run(self) -> None:
        self.device = self.device_kind(self.scheduler.pool.page_size, self.random)
        now, patience = 0, 100 + sum(60 * (len(job.prompt) + job.max_tokens) for job in self.jobs)
        while now <= 45 or self.scheduler.has_work:
            assert now < patience, "no end"
            self.arrive(now)
            self.cancel(now, in_flight=False)
            plan = self.plan(float(now))
            flight = self.device.launch(plan)
            self.cancel(now, in_flight=True)
            self.scheduler.update(plan, self.device.read(flight), float(now), self.random.choice([0.0, 0.5, 1.0, 2.0]))
            self.check_books()
            now += 1
        self.check_end()

    def arrive(self, now: int) -> None:
        for i, job in enumerate(self.jobs):
            if job.arrival == now:
                request = self.requests[str(i)] = Request(
                    str(i), len(job.prompt), list(job.prompt), job.max_tokens, float(now), self.random.randint(-1, 1),
                    slo=self.random.choice(TARGETS), reuse_prefix=not job.prompt_logprobs,
                    prompt_logprobs=job.prompt_logprobs,
                )  # fmt: skip
                self.scheduler.add(request, float(now))
            if job.arrival + 3 == now and self.random.random() < 0.3:
                there = self.requests[str(i)].status is not RequestStatus.FINISHED
                assert self.scheduler.predicted(str(i), self.random.randint(1, 20), float(now)) == there

    def cancel(self, now: int, in_flight: bool) -> None:
        for i, job in enumerate(self.jobs):
            due = job.cancel is not None and job.arrival + job.cancel == now and job.in_flight == in_flight
            if due and self.scheduler.cancel(str(i), float(now)):
                self.cancelled.add(str(i))

    def plan(self, now: float) -> Plan:
        scheduler, config = self.scheduler, self.scheduler.config
        wake = scheduler.wake(now)
        ran = {request.id for request in scheduler.running}
        pinned = [request for request in scheduler.running if not scheduler.order.preemptible(request)]
        since = {name: at for name, (at, _) in scheduler.waiting._wait_times._young.items()}
        since |= {name: at for name, (at, _) in scheduler.waiting._wait_times._old.items()}
        plan = scheduler.plan(now, Lookahead(self.random.randint(0, 5), self.random.randint(0, 3)))
        planned = {scheduled.request.id: scheduled for scheduled in plan.scheduled}
        preempted = {request.id for request in plan.preempted}
        paused = {request.id for request in plan.paused}
        self.log.append((sorted((w.request.id, w.start, w.count, w.levels) for w in plan.scheduled), preempted, paused))

        if scheduler.has_work and not plan.scheduled:
            assert config.policy.batching == "dynamic" and not scheduler.running, "a step without progress"
            again = scheduler.wake(now)
            assert again is not None and now < again <= now + config.policy.batch_wait_timeout_ms / 1000
            assert wake is None or wake == again
        assert len(planned) == len(plan.scheduled) and not planned.keys() & (preempted | paused)
        assert (paused <= ran and not paused) or scheduler.order.preemptive
        assert not any(request.id in paused for request in pinned)
        drafts = sum(scheduled.drafts for scheduled in plan.scheduled)
        assert plan.num_tokens + drafts <= config.max_num_batched_tokens
        assert drafts + sum(scheduled.logit_rows for scheduled in plan.scheduled) <= config.max_logit_rows
        assert scheduler.num_running <= scheduler._batching.size <= config.max_num_seqs
        came = {
            scheduled.request.id
            for scheduled in plan.scheduled
            if scheduled.request.id not in ran or not scheduled.request.decoding
        }
        prompts_first = config.policy.prefill == "first" and came
        if config.policy.pace == "none" and not prompts_first:
            for request in scheduler.running:
                assert request.id in planned or not request.decoding, "a decoding request was passed over"
        self.check_aging(now, since, ran)
        self.check_writes(plan)
        return plan

    def check_aging(self, now: float, since: dict[str, float], ran: set[str]) -> None:
        """Nobody is let in while somebody waits who has waited too long, except others who have."""
        if self.scheduler._aging is None:
            return
        limit = self.scheduler._aging_seconds
        overdue = {name for name, at in since.items() if now >= at + limit}
        left = {request.id for request in self.scheduler.waiting} & overdue
        came = {request.id for request in self.scheduler.running} - ran
        assert not left or all(self.scheduler._aging.key(self.requests[name]) == (0,) for name in came)

    def check_writes(self, plan: Plan) -> None:
        """Work goes on where its request stands, in pages that it has and that nobody else holds or finds."""
        pool = self.scheduler.pool
        everybody = (*self.scheduler.running, *self.scheduler.waiting)
        holders = Counter(page for request in everybody for page in request.pages)
        for scheduled in plan.scheduled:
            pages, end = scheduled.request.pages, scheduled.start + scheduled.count
            assert scheduled.request.status is RequestStatus.RUNNING and scheduled.start == scheduled.request.computed
            assert (
                0 < scheduled.count <= scheduled.request.remaining_known and 0 <= scheduled.levels <= scheduled.drafts
            )
            assert pool.pages_for(end + scheduled.levels) <= len(pages)
            for page in pages[scheduled.start // pool.page_size :]:
                assert holders[page] == 1 and page not in pool._prefixes

    def check_books(self) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        self.scheduler.pool.check([request.pages for request in (*running, *waiting)])
        assert all(request.status is RequestStatus.RUNNING for request in running)
        for request in waiting:
            assert request.status is (RequestStatus.PAUSED if request.pages else RequestStatus.WAITING)
        assert self.scheduler.waiting.paused_pages == sum(len(request.pages) for request in waiting)
        assert waiting == sorted(waiting, key=lambda r: (self.scheduler.order.key(r), r.number)), "keys went stale"

    def check_end(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.running and not len(scheduler.waiting) and scheduler.pool.num_used == 0
        assert not scheduler.waiting.num_paused and scheduler.waiting.oldest is None
        for i, job in enumerate(self.jobs):
            request, whole = self.requests[str(i)], solo(job.prompt, job.max_tokens)
            assert request.status is RequestStatus.FINISHED
            assert request.tokens == (whole[: len(request.tokens)] if request.id in self.cancelled else whole)
        requests = self.requests.values()
        assert scheduler.num_preemptions == sum(request.preemptions for request in requests)
        assert scheduler.num_switches == sum(request.switches for request in requests)
        assert scheduler.recomputed_tokens >= sum(request.recomputed for request in requests)
        order = getattr(scheduler.order, "_order", scheduler.order)
        assert not getattr(order, "_progress", None)  # nothing is remembered of who has ended
