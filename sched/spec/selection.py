"""Runs a tree policy's selection within what fits in the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from jaxspec.sched.spec.trees.policy import StepCandidates, TreePolicy

#: Relative difference from which two step times count as clearly different.
_CLEAR = 0.05


def even_shares(wanted: Sequence[int], nodes: int) -> list[int]:
    """Divide `nodes` evenly among requests, none of which gets more than it wants."""
    shares, left = [0] * len(wanted), max(nodes, 0)
    for rank, i in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[i] = min(wanted[i], left // (len(wanted) - rank))
        left -= shares[i]
    return shares


def select_nodes(policy: TreePolicy, step: StepCandidates, probing: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
    """The nodes to verify: one mask per tree.

    `step.limits` are those of each request alone. A policy that does not share the room itself gets even shares of it.
    The trees `probing` get at least one node, as long as it fits, because a probe needs one to learn from. Raises
    `ValueError` if the policy selects more than fits.
    """
    if not policy.shares_room:
        step = replace(step, limits=even_shares(step.limits, step.room))
    masks = policy.select(step)
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    left = step.room - sum(counts)
    if left < 0 or any(count > max(limit, 0) for count, limit in zip(counts, step.limits, strict=True)):
        name, limits = type(policy).__name__, [*step.limits]
        raise ValueError(f"{name} selected {counts} draft nodes where {limits} and {step.room} in all are allowed")
    if policy.by_budget:
        left = min(left, step.budget - sum(counts))
    for tree in probing:
        if not counts[tree] and step.limits[tree] > 0 and left > 0:
            masks[tree][step.forest[tree].best(1)[0]] = True
            left -= 1
    return masks


def select_for_slos(
    policy: TreePolicy, step: StepCandidates, probing: Sequence[int], seconds: Callable[[int], float],
    needs: Callable[[float], Sequence[float]],
) -> list[npt.NDArray[np.bool_]]:  # fmt: skip
    """`select_nodes` with `StepCandidates.needs`, which depend on the seconds of the step (AdaServe's t_spec).

    `seconds`: draft nodes -> seconds of the step; `needs`: seconds of the step -> tokens that each request needs. A
    policy that uses the whole budget is expected to do so, one that is `adaptive` to select nothing. If the selected
    step takes clearly longer or shorter, the nodes are selected once more, with the needs for that time. So needs never
    grow from a long step that only they would make long.
    """
    expected = seconds(0 if policy.adaptive else max(0, min(step.budget, step.room)))
    masks = select_nodes(policy, replace(step, needs=needs(expected)), probing)
    selected = seconds(sum(int(np.count_nonzero(mask)) for mask in masks))
    if abs(selected - expected) > _CLEAR * expected:
        masks = select_nodes(policy, replace(step, needs=needs(selected)), probing)
    return masks
