"""From settings to a speculator that is compiled, warmed up and profiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.draft.choice import arrange, tree_policy
from jaxspec.draft.drafter import ModelDrafter, NgramDrafter
from jaxspec.draft.growth import Draws
from jaxspec.draft.runner import BEAMS, Device, DraftRunner, draft_lattice
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.weights import Weights
from jaxspec.sched.drafter import Drafter
from jaxspec.sched.speculator import DEPTH, Speculator
from jaxspec.sched.trees import Drawing, Fixed
from jaxspec.step.executor import Executor
from jaxspec.step.profiles import ProfileStore
from jaxspec.step.rejection import Drawn
from jaxspec.step.warmup import WarmUp

#: Configuration and weights of each drafter by its name, None of n-gram lookup.
Models = Mapping[str, tuple[DecoderConfig, Weights] | None]


def build(
    config: EngineConfig,
    executor: Executor,
    models: Models,
    num_pages: int,
    warm_up: WarmUp,
    store: ProfileStore,
    clock: Callable[[], float],
) -> Speculator:
    """The speculator of these drafters, beside `executor`. Measured times are kept in `store`."""
    drawing = _drawing(config, models)
    devices = _devices(config, models)
    largest = executor.shapes[-1]
    sizes = largest.tokens, largest.trees, largest.pages
    side_by_side: list[Drafter] = []
    for name, model in models.items():
        if model is None:
            side_by_side.append(NgramDrafter())
            continue
        shapes = draft_lattice(*sizes, fine=name in devices)
        runner = DraftRunner(
            name, *model, executor, executor.layers, shapes, num_pages, config.page_size, config.dtype,
            BEAMS if drawing is None else [drawing], devices.get(name), store,
        )  # fmt: skip
        needed, more = runner.jobs()
        # Who drafts for whom is chosen by what each drafter takes, and a device of its own is not idle work.
        if config.draft_choice != "fastest" or devices:
            warm_up.first("compiling the drafter", [*needed, *more])
            runner.profile.measure()
        else:
            warm_up.later("compiling the drafter", needed, rank=1)
            warm_up.later("compiling the drafter", more, rank=4)
            warm_up.measure(runner.profile)
        side_by_side.append(ModelDrafter(runner, clock))
    step = executor.times
    policy = tree_policy(config, step) if drawing is None else Drawing(config.draft_levels or DEPTH)
    speculator = arrange(config, side_by_side, step, policy)
    executor.settled()
    return speculator


def _devices(config: EngineConfig, models: Models) -> dict[str, Device]:
    """Where drafters run that don't run beside the target. Raises `ConfigError` naming what is not there."""
    known = jax.devices()
    for name, number in config.draft_devices.items():
        if models.get(name) is None:
            there = ", ".join(n for n, model in models.items() if model is not None) or "none"
            raise ConfigError(f"draft_devices: no draft model {name!r} here (there is: {there})")
        if number >= len(known):
            raise ConfigError(f"draft_devices.{name}: no device {number}, there are {len(known)}")
        if config.acceptance == "rejection" and number:
            raise ConfigError("draft_devices: acceptance: rejection needs its drafter beside the target")
    return {name: known[number] for name, number in config.draft_devices.items()}


def runners(speculator: Speculator | None) -> list[DraftRunner]:
    """Those of the drafters that are models beside the target: their pools are swapped along with its own."""
    models = [d for d in speculator.drafters if isinstance(d, ModelDrafter)] if speculator else []
    return [d.runner for d in models if not d.apart]


def _drawing(config: EngineConfig, models: Models) -> Draws | None:
    """How drafts are drawn for rejection sampling, which fixes a tree's shape before; None without it.

    N-gram lookup draws nothing: what it is sure of is accepted by the same chance under both rules.
    """
    if config.acceptance != "rejection" or not any(models.values()):
        return None
    return Draws(Fixed().widths if config.tree == "fixed" else (1,) * DEPTH)


def room_for_draws(config: EngineConfig, models: Models) -> Drawn:
    """Where the distributions that drafts were drawn from are kept until they are verified.

    Raises `ConfigError` for more than one draft model: there is one vocabulary.
    """
    drawing = _drawing(config, models)
    if drawing is None:
        return Drawn.none()
    drawn = [model for model in models.values() if model is not None]
    if len(drawn) > 1:
        raise ConfigError("draft: acceptance: rejection works with one draft model (and ngram)")
    return Drawn.room(config.max_num_seqs, DEPTH, drawing.width, jnp.array(drawn[0][1]["vocab"], jnp.int32))
