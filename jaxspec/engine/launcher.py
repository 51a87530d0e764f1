"""Starts steps: drafts for a plan's requests, and gives their token trees to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxspec.config import EngineConfig
from jaxspec.engine.micro_batch import MicroBatch
from jaxspec.engine.request_state import RequestState
from jaxspec.engine.startup import Parts
from jaxspec.engine.step_under_way import StepUnderWay
from jaxspec.sched.request import Request
from jaxspec.sched.slots import Need
from jaxspec.sched.spec.draft_room import DraftRoom
from jaxspec.sched.spec.micro_batches import split
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.step.packing import SamplingInputs


class Launcher:
    """Launches steps for the engine loop, each in one micro-batch or several. `states` are the requests by id."""

    def __init__(self, config: EngineConfig, parts: Parts, states: Mapping[str, RequestState]) -> None:
        self._states, self._model_runner = states, parts.model_runner
        #: Decides on drafts.
        self.speculator = parts.speculator
        #: Micro-batches of a step; None: as many as the profile says (SPIN §V-B).
        self.micro_batches = config.micro_batches
        #: Whether groups of requests take turns on drafters' devices; None: where the profile says that it pays.
        self.draft_turns = config.draft_turns
        self._int8_kv = config.kv_cache_dtype == "int8"
        self._async = bool(config.async_scheduling)

    @property
    def may_take_turns(self) -> bool:
        """Whether groups of requests may take turns: not where a step's drafts depend on the other group."""
        if self.draft_turns is False or self.speculator.assignment or Need.SLOS in self.speculator.policy.needs:
            return False
        own = [drafter for drafter in self.speculator.drafters if drafter.own_device]
        return bool(own) and not any(drafter.reads_features for drafter in own)

    @property
    def overlaps(self) -> bool:
        """Whether a step may be planned while another is under way. A draft choice learns from each step in turn."""
        return self._async and self.speculator.assignment is None

    @property
    def _follows_drafts(self) -> bool:
        """Whether a step can follow one with drafts whose results the host lacks. The host assigns INT8 pages."""
        one = self.micro_batches in (None, 1) and not self._int8_kv
        return one and self.overlaps and self.speculator.ahead.possible

    @property
    def drafts_ahead(self) -> bool:
        """Whether the drafts of the step that is being planned may be verified before the host has read them."""
        return self._follows_drafts and self.speculator.ahead.drafter is not None

    def launch(self, step: StepUnderWay, before: MicroBatch | None, in_turns: bool) -> None:
        """Start a step. `before` samples tokens that are not known yet; `in_turns`: in one micro-batch."""
        scheduled, room = step.plan.scheduled, DraftRoom.of(step.plan)
        states = [self._states[s.request.id] for s in scheduled]
        penalties = {state.request: state.params for state in states if state.penalised}
        penalty_rows = self._model_runner.penalties.update(penalties)
        needs_tokens = any(state.penalised or state.constraint for state in states)
        if before is not None or (self.drafts_ahead and not needs_tokens):
            step.batches.append(self._launch_ahead(step, states, room, penalty_rows, before))
            step.may_be_followed = self._follows_drafts
        else:
            self.speculator.prefetch_features(scheduled)
            for part in split(scheduled, self.speculator, 1 if in_turns else self.micro_batches):
                with step.timer.outside_step():
                    drafts = self.speculator.draft(part, self._sampling_of, room, step.timer.begun, self._allowed)
                of_part = [self._states[s.request.id] for s in part]
                step.batches.append(MicroBatch.launch(part, of_part, drafts, penalty_rows, self._model_runner))
            self.speculator.precompute_kv(scheduled, self._sampling_of)
        step.terms = self.speculator.terms

    def _launch_ahead(
        self, step: StepUnderWay, states: Sequence[RequestState], room: DraftRoom, penalty_rows: Mapping[str, int],
        before: MicroBatch | None,
    ) -> MicroBatch:  # fmt: skip
        """Start a step whose drafts the host reads together with its results, or a plain one that follows `before`."""
        scheduled, ahead = step.plan.scheduled, None
        if self.drafts_ahead:
            free = [s for s, state in zip(scheduled, states, strict=True) if not state.constraint]
            follows = ({}, None) if before is None else (before.trees, before.pending.new)
            ahead = self.speculator.ahead.draft(free, self._sampling_of, room, *follows)
        try:
            return MicroBatch.launch(scheduled, states, {}, penalty_rows, self._model_runner, before, ahead)
        except Exception:
            if ahead is not None:
                self.speculator.read_ahead(ahead)  # raises if the drafter is to blame
            raise

    def _sampling_of(self, request: Request) -> SamplingInputs:
        return self._states[request.id].sampling

    def _allowed(self, request: Request, candidates: Candidates) -> Candidates:
        """The candidates that the request's constraint allows. Random draws must not be filtered (`step.rejection`)."""
        constraint = self._states[request.id].constraint
        return candidates if constraint is None or candidates.drawn is not None else constraint.prune(candidates)
