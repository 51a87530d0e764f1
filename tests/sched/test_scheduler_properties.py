"""Properties of the scheduler under any workload, on a fake device with paged memory."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.paged import STEMS, Device, Job, jobs, solo
from jaxspec.sched import PagePool, Plan, Request, RequestStatus, Scheduler, SchedulerConfig
from jaxspec.sched.plan import Lookahead
from jaxspec.sched.scheduler import NO_DRAFTS


@st.composite
def schedulers(draw: st.DrawFn, longest: int) -> Scheduler:
    """A scheduler with limits from barely enough for one request up to plenty."""
    seqs, page_size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    tokens, slots = seqs + draw(st.integers(0, 20)), seqs + draw(st.integers(0, 8))
    pages = -(-longest // page_size) + draw(st.integers(0, 12))
    config = SchedulerConfig(seqs, tokens, longest, None, slots)
    return Scheduler(config, PagePool(pages, page_size, draw(st.sampled_from([True, True, False]))))


class Drive:
    """Steps a scheduler and a device through jobs and checks every plan."""

    def __init__(self, scheduler: Scheduler, jobs: list[Job], drafts: Random | None) -> None:
        self.scheduler, self.jobs = scheduler, jobs
        self.device = Device(scheduler.pool.page_size, drafts)
        self.requests: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.drafted = 0  # pieces of work that might draft
        self.admitted: list[str] = []  # in the order of their first plan

    def run(self) -> None:
        now, patience = 0, 31 + sum(40 * (len(job.prompt) + job.max_tokens) for job in self.jobs)
        while now <= 45 or self.scheduler.has_work:
            assert now < patience, "no end"
            self._arrive(now)
            self._cancel(now, during_step=False)
            plan = self._plan(now)
            pending = self.device.launch(plan)
            self._cancel(now, during_step=True)
            before = {scheduled.request.id: len(scheduled.request.tokens) for scheduled in plan.scheduled}
            results = self.device.read(pending)
            self.scheduler.update(plan, results, float(now))
            for scheduled, result in zip(plan.scheduled, results, strict=True):
                request, gone = scheduled.request, scheduled.request.id in self.cancelled
                assert len(request.tokens) - before[request.id] == (0 if gone else len(result.tokens))
                assert request.ended or request.computed < len(request.tokens)
            self._check_books()
            now += 1

    def _arrive(self, now: int) -> None:
        for i, job in enumerate(self.jobs):
            if job.arrival == now:
                request = Request(
                    str(i), len(job.prompt), list(job.prompt), job.max_tokens, float(now),
                    reuse_prefix=not job.prompt_logprobs, prompt_logprobs=job.prompt_logprobs,
                )  # fmt: skip
                self.requests[request.id] = request
                self.scheduler.add(request, float(now))

    def _cancel(self, now: int, during_step: bool) -> None:
        for i, job in enumerate(self.jobs):
            if job.cancel is not None and job.arrival + job.cancel == now and job.during_step == during_step:
                there = not self.requests[str(i)].ended
                assert self.scheduler.cancel(str(i), float(now)) == there
                if there:
                    self.cancelled.add(str(i))

    def _plan(self, now: int) -> Plan:
        scheduler, config = self.scheduler, self.scheduler.config
        decoding = [request for request in scheduler.running if request.decoding]
        had_work = scheduler.has_work
        random = self.device.drafts
        lookahead = (
            Lookahead(random.randint(0, 5), random.randint(0, 3), random.random() < 0.5) if random else NO_DRAFTS
        )
        plan = scheduler.plan(float(now), lookahead)
        self.drafted += sum(scheduled.levels > 0 for scheduled in plan.scheduled)
        planned = {scheduled.request.id: scheduled for scheduled in plan.scheduled}
        preempted = {request.id for request in plan.preempted}

        assert bool(plan.scheduled) == had_work, "a step without progress"
        assert len(planned) == len(plan.scheduled) and not planned.keys() & preempted
        drafts, each = plan.draft_nodes, [scheduled.drafts for scheduled in plan.scheduled]
        assert max(each, default=0) <= drafts and (lookahead.pooled or sum(each) <= drafts)
        assert plan.num_tokens + drafts <= config.max_num_batched_tokens
        assert drafts + sum(scheduled.logit_rows for scheduled in plan.scheduled) <= config.max_logit_rows
        assert scheduler.num_running <= config.max_num_seqs
        for request in decoding:
            assert request.id in preempted or planned[request.id].count == 1, "a decoding request was passed over"
        self._check_writes(plan)
        self.admitted += [
            scheduled.request.id for scheduled in plan.scheduled if scheduled.request.id not in self.admitted
        ]
        return plan

    def _check_writes(self, plan: Plan) -> None:
        """A step continues at `computed`, in pages of its request that no other request holds or can find by prefix."""
        pool = self.scheduler.pool
        holders = Counter(page for request in self.scheduler.running for page in request.pages)
        for scheduled in plan.scheduled:
            pages, end = scheduled.request.pages, scheduled.start + scheduled.count
            assert scheduled.request.status is RequestStatus.RUNNING and scheduled.start == scheduled.request.computed
            assert 0 < scheduled.count <= scheduled.request.remaining_known
            assert pool.pages_for(end + scheduled.levels) <= len(pages)
            assert 0 <= scheduled.levels <= scheduled.drafts
            assert (
                not scheduled.levels or scheduled.levels < scheduled.request.max_tokens - scheduled.request.output_len
            )
            for page in pages[scheduled.start // pool.page_size :]:
                assert holders[page] == 1 and page not in pool._prefixes

    def _check_books(self) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        self.scheduler.pool.check([request.pages for request in running])
        assert all(request.status is RequestStatus.RUNNING for request in running)
        assert all(request.status is RequestStatus.WAITING and not request.pages for request in waiting)
        line = [int(request.id) for request in (*running, *waiting)]
        assert line == sorted(line, key=lambda i: (self.jobs[i].arrival, i)), "not in order of arrival"

    def check_end(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.running and not list(scheduler.waiting) and scheduler.pool.num_used == 0
        for i, job in enumerate(self.jobs):
            request, whole = self.requests[str(i)], solo(job.prompt, job.max_tokens)
            assert request.ended
            assert request.tokens == (whole[: len(request.tokens)] if request.id in self.cancelled else whole)
            assert request.cached_tokens < len(job.prompt)
        assert self.admitted == sorted(self.admitted, key=lambda i: (self.jobs[int(i)].arrival, int(i)))
        assert scheduler.num_preemptions == sum(request.preemptions for request in self.requests.values())


@settings(max_examples=400, deadline=None)
@given(st.data(), st.lists(jobs, min_size=1, max_size=12), st.one_of(st.none(), st.integers(0, 99)))
def test_every_request_says_what_it_says_alone_and_nothing_is_leaked(
    data: st.DataObject, jobs: list[Job], draft_seed: int | None
):
    longest = max(len(job.prompt) + job.max_tokens for job in jobs)
    drive = Drive(data.draw(schedulers(longest)), jobs, None if draft_seed is None else Random(draft_seed))
    drive.run()
    drive.check_end()


def test_the_properties_meet_preemptions_and_shared_prefixes():
    """The workloads above would prove little if they never ran out of pages or never shared one."""
    preempted = hits = drafted = 0
    for seed in range(20):
        random = Random(seed)
        jobs = [
            Job(random.randint(0, 10), STEMS[random.randint(0, 1)][: random.randint(1, 12)], 12, False, None, False)
            for _ in range(10)
        ]
        scheduler = Scheduler(SchedulerConfig(4, 8, 40, None, 4), PagePool(8, 4))
        drive = Drive(scheduler, jobs, random if seed % 2 else None)
        drive.run()
        drive.check_end()
        preempted, hits = preempted + scheduler.num_preemptions, hits + scheduler.prefix_hits
        drafted += drive.drafted
    assert preempted > 20 and hits > 20 and drafted > 20
