"""Draft trees in the simulator: what is accepted is what the process says, and the same whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.candidate_trees import levels, preorder
from jaxspec.config import EngineConfig
from jaxspec.draft.speculator import build_speculator
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.plan import Plan, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.acceptance import Process
from jaxspec.sched.sim.cost import LLAMA2_A100, Linear, Roofline, StepLoad
from jaxspec.sched.sim.draft_cost import LLAMA_160M_A100, DraftCost
from jaxspec.sched.sim.drafter import SimulatedDrafter, TreeProcess
from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.slots import TREES
from jaxspec.sched.spec.trees.candidates import Candidates, Draft
from jaxspec.sched.spec.trees.fixed import SPECINFER
from jaxspec.sched.timing import StepTimes

PROCESS = TreeProcess(Process(0.66, 0.1))
COST = Roofline(10e-3, 0.1e-3, 1e-6)


def drafter(outputs: list[int], seed: int = 0, process: TreeProcess = PROCESS) -> SimulatedDrafter:
    return SimulatedDrafter(process, outputs, LLAMA_160M_A100, np.random.default_rng(seed))


def decoding(i: int, output: int) -> Request:
    return Request(str(i), 8, [0] * (8 + output), 500, 0.0, computed=7 + output)


def accepted_of(drafter: SimulatedDrafter, request: Request, candidates: Candidates | None) -> list[int]:
    """Accepted nodes when all candidates are verified."""
    assert candidates is not None
    return drafter.accepted(request, preorder(candidates, np.ones(len(candidates), bool)))


def simulation(
    scheduled: Workload, pages: int = 4096, max_num_seqs: int = 32, budget: int = 256, **settings: Any
) -> tuple[TreeSimulation, PagePool]:
    config = EngineConfig.load(None, **settings)
    times = StepTimes({n: COST.seconds(StepLoad(n)) for n in range(1, budget + 1)})
    pool = PagePool(pages, 16, enable_prefix_caching=False)
    limits = SchedulerConfig(max_num_seqs, budget, 4096, None, budget, config.policy, times=times)
    scheduler = Scheduler(limits, pool)
    if not config.draft:
        return TreeSimulation(scheduler, scheduled, COST), pool
    own = drafter(scheduled.output.tolist())
    return TreeSimulation(scheduler, scheduled, COST, build_speculator(config, [own], times), [own]), pool


def workload(count: int = 40, rate: float = 4.0, seed: int = 0, tpot: float = 12e-3) -> Workload:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, count))
    return Workload(
        arrival, rng.integers(1, 200, count), rng.integers(1, 120, count), np.full(count, np.nan),
        np.where(rng.random(count) < 0.6, tpot, np.nan),
    )  # fmt: skip


def test_shares_come_out_as_the_process_says():
    """Of the first choice, of a chain's levels, and of the likeliest four children of the root."""
    outputs = [1200] * 40
    one, chain, wide = np.zeros(2), np.zeros(9), 0.0
    own = drafter(outputs, process=TreeProcess(Process(0.66)))
    rounds = 0
    for at in range(1, 1100, 9):
        scheduled = [ScheduledRequest(decoding(i, at), 7 + at, 1, 32, 8) for i in range(40)]
        for w, c in zip(scheduled, own.propose(scheduled, lambda _: None, 8, 1)(), strict=True):
            accepted = accepted_of(own, w.request, c)
            assert accepted == list(range(len(accepted)))
            chain[: len(accepted) + 1] += 1
            rounds += 1
        for w, c in zip(scheduled, own.propose(scheduled, lambda _: None, 1, 4)(), strict=True):
            wide += len(accepted_of(own, w.request, c))
            assert c is not None
            one += np.exp(c.logprob[0]), np.exp(c.logprob).sum()
    shares = chain[1:] / chain[:-1]
    assert shares == pytest.approx(0.66, abs=0.05)
    assert wide / rounds == pytest.approx(0.86, abs=0.02)
    assert 0.66 < one[0] / rounds < 0.75  # too sure of itself, on the whole
    assert wide / rounds < one[1] / rounds + 0.05


def test_beams_are_trees_of_the_likeliest_nodes():
    own = drafter([300] * 3)
    scheduled = [ScheduledRequest(decoding(i, 5 + i), 12 + i, 1, 32, 8) for i in range(3)]
    for candidates in own.propose(scheduled, lambda _: None, 5, 4)():
        assert candidates is not None and len(candidates) == 20
        assert candidates.depths() == sorted(candidates.depths()) and levels(candidates) == 5
        pairs = list(zip(candidates.parent.tolist(), candidates.token.tolist(), strict=True))
        assert len(set(pairs)) == 20
        values = candidates.logprob.tolist()
        assert all(v < 0 for v in values)
        assert all(v <= values[p] for v, p in zip(values, candidates.parent.tolist(), strict=True) if p >= 0)
    assert own.uncached_tokens(scheduled[0].request) == 0
    expected = LLAMA_160M_A100.seconds(3, 13 + 14 + 15, 5, 4)
    assert own.spent == expected and LLAMA_160M_A100.seconds(3, 9, 0, 4) == 0


def fixed(outputs: list[int]) -> SimulatedDrafter:
    rng = np.random.default_rng(0)
    return SimulatedDrafter(PROCESS, outputs, LLAMA_160M_A100, rng, expansion=SPECINFER)


def test_expansions_are_trees_of_each_node_s_likeliest_children():
    own, beams = fixed([300] * 3), drafter([300] * 3)
    assert own.widths == (3,)
    scheduled = [ScheduledRequest(decoding(i, 5 + i), 12 + i, 1, 32, 8) for i in range(3)]
    chains = beams.propose(scheduled, lambda _: None, 8, 1)()
    for candidates, chain in zip(own.propose(scheduled, lambda _: None, 8, 3)(), chains, strict=True):
        assert candidates is not None and chain is not None
        assert np.bincount(candidates.depths()).tolist() == [0, 1, 1, 3, 3, 3, 3, 3, 3]
        assert candidates.parent.tolist() == [-1, 0, 1, 1, 1, *range(2, 17)]
        assert candidates.token.tolist() == [0, 0, 0, 1, 2, *[0] * 15]
        path = [0, 1, *range(2, 20, 3)]  # of first children: the chain, if each of them is the likeliest
        assert candidates.logprob[path].tolist() == pytest.approx(chain.logprob.tolist())


def test_specinfer_verifies_its_20_nodes(monkeypatch: pytest.MonkeyPatch):
    scheduled = Workload(np.zeros(4), np.full(4, 9), np.full(4, 60), np.full(4, np.nan), None)
    config = EngineConfig.load(None, tree="fixed")
    times = StepTimes({n: COST.seconds(StepLoad(n)) for n in range(1, 257)})
    limits = SchedulerConfig(4, 256, 4096, None, 256, config.policy, times=times)
    own = fixed([60] * 4)
    speculator = build_speculator(config, [own], times)
    scheduler = Scheduler(limits, PagePool(64, 16, enable_prefix_caching=False))
    sizes = list[int]()

    class Spy:
        """Stands in for the speculator's `draft`."""

        def __init__(self) -> None:
            self.draft = speculator.draft

        def __call__(self, scheduled: Sequence[ScheduledRequest], *args: Any) -> dict[str, Draft]:
            out = self.draft(scheduled, *args)
            sizes.extend(len(out[s.request.id]) for s in scheduled if s.request.id in out and s.levels == 8)
            return out

    monkeypatch.setattr(speculator, "draft", Spy())
    TreeSimulation(scheduler, scheduled, COST, speculator, [own]).run()
    assert set(sizes) == {20} and len(sizes) > 20


def test_the_truth_does_not_depend_on_what_is_drafted():
    """At any place of its text, whether chain or tree, asked before or not: the same child is right."""
    outputs, at = [200] * 8, range(1, 180, 7)
    asked, fresh = drafter(outputs), drafter(outputs)
    chains: list[int] = []
    for place in at:
        scheduled = [ScheduledRequest(decoding(i, place), 7 + place, 1, 32, 8) for i in range(8)]
        for w, c in zip(scheduled, asked.propose(scheduled, lambda _: None, 8, 1)(), strict=True):
            chains.append(len(accepted_of(asked, w.request, c)))
        asked.propose(scheduled, lambda _: None, 3, 2)()
    trees: list[int] = []
    for place in at:
        for i in range(8):
            scheduled = ScheduledRequest(decoding(i, place), 7 + place, 1, 32, 8)
            (c,) = fresh.propose([scheduled], lambda _: None, 8, 4)()
            assert c is not None
            best = [i for i, (t, d) in enumerate(zip(c.token, c.depths(), strict=True)) if t == 0 and d == 1]
            while len(best) < 8:  # the path of first choices, where the beam has kept it
                below = [k for k in range(len(c)) if c.parent[k] == best[-1] and c.token[k] == 0]
                if not below:
                    break
                best += below
            trees.append(len(fresh.accepted(scheduled.request, preorder(c, c.mask(best)))) if len(best) == 8 else -1)
    kept = [(a, b) for a, b in zip(chains, trees, strict=True) if b >= 0]
    assert len(kept) > 50 and all(a == b for a, b in kept)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(TREES.names), st.sampled_from(["none", "stta", "deadline"]), st.integers(0, 99), st.integers(14, 60)
)  # fmt: skip
def test_every_request_ends_and_pages_return(tree, pace, seed, pages):
    """Under memory pressure too; and every request writes what it has to."""
    scheduled = workload(20, rate=30.0, seed=seed)
    run, pool = simulation(scheduled, pages=max(pages, 20), max_num_seqs=6, budget=64, tree=tree, pace=pace)
    served = run.run()
    assert np.isfinite(served.finished).all() and pool.num_free == pool.num_pages
    assert (served.accepted <= served.drafted).all() and served.drafted.sum() > 0
    # Each round gives its accepted tokens and one more, but for what is beyond the last.
    assert (served.accepted + served.rounds <= scheduled.output + 8).all()


def test_micro_batches_of_a_step_share_one_verify_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches of a drafter on its own device verify no more than B tokens together."""
    own_device = partialmethod(SimulatedDrafter.__init__, own_device=True)
    monkeypatch.setattr(SimulatedDrafter, "__init__", own_device)
    run, _ = simulation(workload(20, rate=30.0), tree="global_greedy", verify_budget=16)
    loads: list[StepLoad] = []
    steps: list[list[int]] = []
    seconds = COST.seconds

    class Counting:
        def seconds(self, load: StepLoad) -> float:
            loads.append(load)
            return seconds(load)

    class Counted(TreeSimulation):
        def _time(self, plan: Plan, now: float) -> tuple[float, float]:
            loads.clear()
            took = super()._time(plan, now)
            steps.append([plan.num_tokens, sum(load.tokens for load in loads), len(loads)])
            return took

    run = Counted(run.scheduler, run.workload, Counting(), run.speculator, run.drafters, micro_batches=2)
    assert np.isfinite(run.run().finished).all()
    assert all(tokens <= max(16, known) for known, tokens, _ in steps)
    assert sum(parts == 2 and tokens == 16 for _, tokens, parts in steps) > 20


def test_without_a_speculator_it_is_the_plain_simulation():
    run, _ = simulation(workload(), draft=[])
    served = run.run()
    assert served.drafted.sum() == 0 and run.drafting == 0
    with pytest.raises(ValueError, match="drafter"):
        TreeSimulation(run.scheduler, run.workload, COST, None, [drafter([3])])


@pytest.mark.slow
def test_drafts_bring_tokens_sooner_and_more_requests_meet_their_slo():
    """On the plateau drafts are nearly free; at the load where that ends, SLOs decide which requests get them."""
    few = workload(60, tpot=10e-3)
    light = {tree: simulation(few, tree=tree)[0].run() for tree in ("auto", "global_greedy")}
    plain = simulation(few, draft=[])[0].run()
    for served in light.values():
        assert np.nanmean(served.tpot) < 0.6 * np.nanmean(plain.tpot)
        assert served.met.mean() > plain.met.mean()
    heavy = workload(300, rate=16.0, seed=1, tpot=7e-3)
    adaserve = simulation(heavy, tree="adaserve", adaserve={"economic": False}, pace="deadline")[0].run()
    greedy = simulation(heavy, tree="global_greedy")[0].run()
    assert adaserve.met.mean() >= greedy.met.mean()


def test_slos_reach_requests_and_attainment_counts_them():
    scheduled = workload()
    served = simulation(scheduled, draft=[])[0].run()
    assert scheduled.tpot is not None
    assert served.met.tolist() == [not t > x for t, x in zip(served.tpot, scheduled.tpot, strict=True)]
    with pytest.raises(ValueError, match="tpot has 1 rows"):
        Workload(scheduled.arrival, scheduled.input, scheduled.output, scheduled.predicted, np.ones(1))


def test_the_paper_s_baseline_latency():
    """12.5 ms with eight requests of 32 tokens that write 128; the budget is near Table 1's 156."""
    cost = LLAMA2_A100["llama-2-7b"].cost
    assert cost.seconds(StepLoad(8, 0, 8 * (32 + 64))) == pytest.approx(12.5e-3)
    assert cost.weights / cost.token == pytest.approx(140.5, abs=0.1)
    assert DraftCost(1.0, 0.1).seconds(4, 30, 3, 4) == pytest.approx(3.0 + 2 * 1.6)


@pytest.mark.parametrize(("wrong", "named"), [({"evenness": 0}, "evenness"), ({"others": 1.5}, "others")])
def test_parameters_are_checked(wrong, named):
    with pytest.raises(ValueError, match=named):
        TreeProcess(Process(0.5), **wrong)
    two, rng = TreeProcess(Process(0.5), choices=2), np.random.default_rng(0)
    for expansion, reason in (((), "width 4"), ((1, 3), "expansion: width 3")):
        with pytest.raises(ValueError, match=f"{reason} exceeds the process's choices, 2"):
            SimulatedDrafter(two, [5], LLAMA_160M_A100, rng, expansion=expansion)


def test_switching_costs_what_the_model_says_with_drafts_too():
    """Requests that an order pauses have their KV moved out and in again, where the cost model has a price for it."""

    def switched(swap: float) -> tuple[float, int]:
        run, _ = simulation(
            workload(count=12, rate=50.0), max_num_seqs=2, order="las", las={"quantum_ms": 5}, tree="chain"
        )
        run.cost = Linear(step=10e-3, token=1e-5, swap=swap)
        served = run.run()
        return served.busy, served.pauses

    (free, pauses), (priced, _) = switched(0.0), switched(1e-4)
    assert pauses > 5
    assert priced > free + 1e-4 * pauses
