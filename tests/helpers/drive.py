"""Runs a scheduler as the engine does and checks its invariants after each step."""

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
from jaxspec.sched.slots import BATCHINGS, ORDERS, PACES
from jaxspec.sched.timing import StepTimes

#: Every registered policy. A new one is tested without an edit here.
PREEMPTIVE = tuple(name for name in ORDERS.names if ORDERS[name].preempts(ORDERS.section_of(PolicyConfig(order=name))))


#: A step with few tokens takes about a second. SLOs allow a few steps; some cannot be met.
TIMES = StepTimes({n: 0.7 + 0.1 * n for n in range(1, 33)})


SLOS = (Slo(), Slo(tpot=0.5), Slo(tpot=0.9), Slo(tpot=1.2, ttft=2.0), Slo(tpot=4.0), Slo(ttft=9.0))


@st.composite
def policies(draw: st.DrawFn, **fixed: Any) -> PolicyConfig:
    """A random `PolicyConfig`; thresholds are a few steps of one second. `fixed` overrides settings."""
    order = fixed.get("order") or draw(st.sampled_from(ORDERS.names))
    modes = [name for name in BATCHINGS.names if not (order in PREEMPTIVE and BATCHINGS[name].runs_to_end)]
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
                "shrinkage": draw(st.booleans()),
            },
            "alise": {"queues": draw(st.integers(1, 6)), "first_threshold_ms": draw(few)},
            "pace": draw(st.sampled_from(PACES.names)),
            "prefill": draw(st.sampled_from(["mixed", "mixed", "first"])),
        }
        | fixed
    )


@dataclass
class Drive:
    """Runs jobs on a scheduler and a fake device, and checks every plan."""

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
            self.cancel(now, during_step=False)
            plan = self.plan(float(now))
            pending = self.device.launch(plan)
            self.cancel(now, during_step=True)
            self.scheduler.update(plan, self.device.read(pending), float(now), self.random.choice([0.0, 0.5, 1.0, 2.0]))
            self.check_books()
            now += 1
        self.check_end()

    @property
    def guesses(self) -> bool:
        """Whether requests get predictions after their arrival, which may be wrong."""
        return True

    def arrive(self, now: int) -> None:
        for i, job in enumerate(self.jobs):
            if job.arrival == now:
                request = self.requests[str(i)] = Request(
                    str(i), len(job.prompt), list(job.prompt), job.max_tokens, float(now), self.random.randint(-1, 1),
                    slo=self.random.choice(SLOS), reuse_prefix=not job.prompt_logprobs,
                    prompt_logprobs=job.prompt_logprobs,
                )  # fmt: skip
                self.scheduler.add(request, float(now))
            if job.arrival + 3 <= now < job.arrival + 20 and self.random.random() < 0.3 and self.guesses:
                self._predict(str(i), now, again=now > job.arrival + 3)

    def _predict(self, name: str, now: int, again: bool) -> None:
        """A late prediction, or another one while it is generated."""
        request = self.requests[name]
        length = self.random.randint(1, 20) + (request.output_len if again else 0)
        assert self.scheduler.predicted(name, length, float(now), again=again) == (not request.ended)

    def cancel(self, now: int, during_step: bool) -> None:
        for i, job in enumerate(self.jobs):
            due = job.cancel is not None and job.arrival + job.cancel == now and job.during_step == during_step
            if due and self.scheduler.cancel(str(i), float(now)):
                self.cancelled.add(str(i))

    def plan(self, now: float) -> Plan:
        scheduler, config = self.scheduler, self.scheduler.config
        wake = scheduler.wake(now)
        ran = {request.id for request in scheduler.running}
        pinned = [request for request in scheduler.running if not scheduler.order.preemptible(request)]
        since = {name: at for name, (at, _) in scheduler.waiting._wait_times._young.items()}
        since |= {name: at for name, (at, _) in scheduler.waiting._wait_times._old.items()}
        lookahead = Lookahead(self.random.randint(0, 5), self.random.randint(0, 3), self.random.random() < 0.5)
        plan = scheduler.plan(now, lookahead)
        planned = {scheduled.request.id: scheduled for scheduled in plan.scheduled}
        preempted = {request.id for request in plan.preempted}
        paused = {request.id for request in plan.paused}
        self.log.append((sorted((w.request.id, w.start, w.count, w.levels) for w in plan.scheduled), preempted, paused))

        if scheduler.has_work and not plan.scheduled:
            assert config.policy.batching == "dynamic" and not scheduler.running, "a step without progress"
            again = scheduler.wake(now)
            timeout = config.policy.batch_wait_timeout_ms
            assert again is not None and timeout is not None and now < again <= now + timeout / 1000
            assert wake is None or wake == again
        assert len(planned) == len(plan.scheduled) and not planned.keys() & (preempted | paused)
        assert (paused <= ran and not paused) or scheduler.order.preemptive
        assert not any(request.id in paused for request in pinned)
        drafts, each = plan.draft_nodes, [scheduled.drafts for scheduled in plan.scheduled]
        assert max(each, default=0) <= drafts and (lookahead.pooled or sum(each) <= drafts)
        assert plan.num_tokens + drafts <= config.max_num_batched_tokens
        assert drafts + sum(scheduled.logit_rows for scheduled in plan.scheduled) <= config.max_logit_rows
        assert scheduler.num_running <= scheduler.batching.size <= config.max_num_seqs
        came = {
            scheduled.request.id
            for scheduled in plan.scheduled
            if scheduled.request.id not in ran or not scheduled.request.decoding
        }
        prompts_first = config.policy.prefill == "first" and came
        if config.policy.pace == "none" and not prompts_first:
            for request in scheduler.running:
                assert request.id in planned or not request.decoding, "a decoding request was not scheduled"
        self.check_aging(now, since, ran)
        self.check_writes(plan)
        return plan

    def check_aging(self, now: float, since: dict[str, float], ran: set[str]) -> None:
        """While an overdue request waits, only overdue requests are admitted."""
        limit = self.scheduler.aging_seconds
        if self.scheduler.aging is None or limit is None:
            return
        overdue = {name for name, at in since.items() if now >= at + limit}
        left = {request.id for request in self.scheduler.waiting} & overdue
        came = {request.id for request in self.scheduler.running} - ran
        assert not left or all(self.scheduler.aging.key(self.requests[name]) == (0,) for name in came)

    def check_writes(self, plan: Plan) -> None:
        """A step continues at `computed`, in pages of its request that no other request holds or can find by prefix."""
        pool = self.scheduler.pool
        requests = (*self.scheduler.running, *self.scheduler.waiting)
        holders = Counter(page for request in requests for page in request.pages)
        for scheduled in plan.scheduled:
            pages, end = scheduled.request.pages, scheduled.start + scheduled.count
            assert scheduled.request.status is RequestStatus.RUNNING and scheduled.start == scheduled.request.computed
            assert (
                0 < scheduled.count <= scheduled.request.remaining_known and 0 <= scheduled.levels <= scheduled.drafts
            )
            assert pool.pages_for(end + scheduled.request.pending_drafts + scheduled.levels) <= len(pages)
            for page in pages[scheduled.start // pool.page_size :]:
                assert holders[page] == 1 and page not in pool._prefixes

    def check_books(self) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        self.scheduler.pool.check([request.pages for request in (*running, *waiting)])
        assert all(request.status is RequestStatus.RUNNING for request in running)
        for request in waiting:
            assert request.status is (RequestStatus.PAUSED if request.pages else RequestStatus.WAITING)
        assert self.scheduler.waiting.paused_pages == sum(len(request.pages) for request in waiting)
        assert waiting == sorted(waiting, key=lambda r: (self.scheduler.order.key(r), r.number)), (
            "stale keys in the queue"
        )

    def check_end(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.running and not len(scheduler.waiting) and scheduler.pool.num_used == 0
        assert not scheduler.waiting.num_paused and scheduler.waiting.oldest is None
        for i, job in enumerate(self.jobs):
            request, whole = self.requests[str(i)], solo(job.prompt, job.max_tokens)
            cancelled = request.id in self.cancelled
            assert request.status is (RequestStatus.CANCELLED if cancelled else RequestStatus.FINISHED)
            assert request.tokens == (whole[: len(request.tokens)] if cancelled else whole)
        requests = self.requests.values()
        assert scheduler.num_preemptions == sum(request.preemptions for request in requests)
        assert scheduler.num_pauses == sum(request.pauses for request in requests)
        assert scheduler.recomputed_tokens >= sum(request.recomputed for request in requests)
