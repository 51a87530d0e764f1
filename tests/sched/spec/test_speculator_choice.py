"""A policy chooses the drafters: who drafts for whom, and what the policy hears of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from helpers.fake_drafter import STEP, Fake, requests, round_of
from jaxspec.sched.request import Request
from jaxspec.sched.spec.draft_choice.choice import DraftChoice, SwitchCost
from jaxspec.sched.spec.drafter import DrafterFailed
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.chain import Chain

EVERYONE = list("0123")


class Told(DraftChoice):
    """Assigns what it was told, and remembers what it hears."""

    def __init__(self, drafters: dict[str, int | None], next_one: int | None = None) -> None:
        self.drafters, self.next_one = drafters, next_one
        self.heard: list[tuple[str, int | None, int, float]] = []
        self.costs: dict[tuple[str, int], float] = {}
        self.shared: tuple[float, list[float], list[float]] | None = None

    def share(self, step: float, rounds: Sequence[float], verify: Sequence[float]) -> None:
        self.shared = step, list(rounds), list(verify)

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        self.costs = {(r.id, j): cost(r, j) for r in requests for j in range(2)}
        return [self.drafters[r.id] for r in requests]

    def observe(self, request: Request, drafter: int | None, tokens: int, seconds: float) -> None:
        self.heard.append((request.id, drafter, tokens, seconds))

    def ahead(self, request: Request) -> int | None:
        return self.next_one

    def ended(self, request: Request) -> None:
        self.drafters.pop(request.id)


class Far(Fake):
    """Has not seen some of a request, and a device of its own."""

    own_device = True

    def __init__(self, name: str, first: int, cost: float, behind: int = 1) -> None:
        super().__init__(name, first, cost, EVERYONE)
        self.lacks, self.calls = behind, list[str]()

    def uncached_tokens(self, request: Request) -> int:
        return self.lacks

    def seconds(self, requests: int, uncached: int, levels: int, width: int) -> float:
        return self.cost * (levels + uncached)

    def prefetch_features(self, scheduled):
        self.calls.append("stage " + " ".join(w.request.id for w in scheduled))

    def precompute_kv(self, scheduled, sampling):
        self.calls.append("prepare " + " ".join(w.request.id for w in scheduled))


def speculator(choice: Told, *drafters: Fake) -> Speculator:
    return Speculator(drafters, STEP, Chain(2), levels=2, choice=choice)


def test_every_request_gets_the_drafter_that_was_chosen() -> None:
    one, two = Fake("one", 100, 1e-6, EVERYONE), Fake("two", 200, 1e-3, ["1", "2"])
    choice = Told({"0": 0, "1": 1, "2": None, "3": 1})
    own, running = speculator(choice, one, two), requests(4)
    # The second has nothing for request 3: no other drafter takes over.
    assert round_of(own, running) == {"0": 100, "1": 200}
    # A drafter alone drafts for those it was given, and not at all for none.
    choice.drafters |= {"0": 1, "3": None}
    assert round_of(own, running) == {"1": 200} and own.controllers[0].levels == 0


def test_it_hears_of_every_slot() -> None:
    """Each request's tokens, and what the step took it: verifying, and all rounds that take turns with it."""
    one, two = Fake("one", 100, 1e-3, EVERYONE), Fake("two", 200, 2e-3, EVERYONE)
    choice = Told({"0": 0, "1": 1, "2": None})
    own, running = speculator(choice, one, two), requests(3)
    assert set(round_of(own, running)) == {"0", "1"}
    for request, nodes in zip(running, ([0, 1], [], []), strict=True):
        own.observe(request, nodes)
        own.observe(request, nodes)  # of one step only once
    seconds = STEP.of(3 + 2 * 2) + 2 * (1e-3 + 2e-3)
    assert [(*h[:3], pytest.approx(h[3])) for h in choice.heard] == [
        ("0", 0, 3, seconds), ("1", 1, 1, seconds), ("2", None, 1, seconds)
    ]  # fmt: skip
    own.ended(running[0])
    assert "0" not in choice.drafters


def test_it_is_told_what_each_drafters_drafts_add_to_a_step() -> None:
    """The second one has no drafts for its requests, so their steps are no longer than without a drafter."""
    one, two = Fake("one", 100, 1e-3, EVERYONE), Fake("two", 200, 2e-3, [])
    choice = Told({"0": 0, "1": 0, "2": 1, "3": 1})
    own, running = speculator(choice, one, two), requests(4)
    assert set(round_of(own, running)) == {"0", "1"}
    round_of(own, running)
    assert choice.shared is not None
    step, rounds, verify = choice.shared
    assert step == STEP.of(4) and rounds[0] == pytest.approx(2e-3)
    assert verify == pytest.approx([(STEP.of(4 + 2 * 2) - STEP.of(4)) / 2, 0.0])


def test_changes_are_counted_with_what_they_cost() -> None:
    near, far = Fake("near", 100, 1e-4, EVERYONE), Far("far", 200, 1e-5, behind=102)
    choice = Told({"0": 0})
    own, running = speculator(choice, near, far), requests(1)
    assert round_of(own, running) == {"0": 100} and own.switches == (0, 0.0)
    assert choice.costs == {("0", 0): 0.0, ("0", 1): pytest.approx(100e-5)}
    choice.drafters["0"] = 1
    for _ in range(3):
        assert round_of(own, running) == {"0": 200}
    assert own.switches == (1, pytest.approx(100e-5))


def test_drafters_elsewhere_prepare_for_requests_that_may_change_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = Fake("near", 100, 1e-4, EVERYONE), Far("far", 200, 1e-5)
    choice = Told({"0": 0, "1": 1}, next_one=1)
    own, running = speculator(choice, near, far), requests(2)
    scheduled = []

    def prefetch_features(given):
        scheduled.extend(given)
        Speculator.prefetch_features(own, given)

    draft = own.draft
    monkeypatch.setattr(own, "draft", lambda given, *more: (prefetch_features(given), draft(given, *more))[1])
    round_of(own, running)
    own.precompute_kv(scheduled, lambda _: None)
    # It may need both; it need not get ready for the one that it drafts for anyway.
    assert far.calls == ["stage 0 1", "prepare 0"]
    # Its rounds count only for the requests that it drafts for.
    for request in running:
        own.observe(request, [])
    assert [h[3] for h in choice.heard] == [
        pytest.approx(STEP.of(6) + near.seconds(1, 2, 2, 1)),
        pytest.approx(STEP.of(6) + near.seconds(1, 2, 2, 1) + far.seconds(1, 2, 2, 1)),
    ]


def test_a_drafter_that_cannot_prepare_drafts_no_more_although_its_rounds_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would fail in every step: each failure restarts the engine."""
    near, far = Fake("near", 100, 1e-4, EVERYONE), Far("far", 200, 1e-5)
    own, running = speculator(Told({"0": 0, "1": 1}, next_one=1), near, far), requests(2)
    works = [True, False, False, True, False, False, False]

    def precompute_kv(given, sampling):
        if not works.pop(0):
            raise RuntimeError("no idea")

    monkeypatch.setattr(far, "precompute_kv", precompute_kv)
    scheduled, draft = [], own.draft
    monkeypatch.setattr(own, "draft", lambda given, *more: (scheduled.extend(given), draft(given, *more))[1])
    gone = []
    while works:
        assert round_of(own, running) == {"0": 100, "1": 200}
        try:
            own.precompute_kv(scheduled, lambda _: None)
        except DrafterFailed as error:
            gone.append(own.drafter_failed(error))
        scheduled.clear()
    assert gone == [False, False, False, False, True]
    assert round_of(own, running) == {"0": 100} and not own.drafters[1].ready
