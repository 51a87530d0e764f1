"""The drafters that a configuration names: loaded, built and given to a speculator."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.draft.growth import Draws
from jaxspec.draft.model_drafter import ModelDrafter, NgramDrafter
from jaxspec.draft.policies import arrange, tree_policy
from jaxspec.draft.runner import BEAMS, Device, DraftRunner, round_buckets
from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.llama import head_of
from jaxspec.models.load import LoadedModel, load_model
from jaxspec.models.load.drafter_file import load_drafter
from jaxspec.models.load.weights import Weights
from jaxspec.sched.spec.drafter import Drafter
from jaxspec.sched.spec.speculator import DEPTH, Speculator
from jaxspec.sched.spec.trees import Drawing, Fixed
from jaxspec.step.profiles import ProfileStore
from jaxspec.step.rejection import Drawn
from jaxspec.step.runner import ModelRunner
from jaxspec.step.warmup import WarmUp

log = logging.getLogger(__name__)

NGRAM, AUTO = "ngram", "auto"
_TRUNCATED = re.compile(r"truncated:(\d+)\Z")
#: Drafters that come with the package, by name.
SHIPPED = Path(__file__).parent / "trained"


#: The one of them that drafts best for a model, by the model's name.
DEFAULT = {"smollm2-135m": "smollm2-eagle"}


def load_all(names: Sequence[str], target: LoadedModel) -> dict[str, tuple[DecoderConfig, Weights] | None]:
    """What `load` gives for each drafter, None for n-gram lookup. `auto` stands for that and a shipped one, if it fits:
    a model may go by the name of another. Raises `ConfigError` for others that don't fit."""
    out: dict[str, tuple[DecoderConfig, Weights] | None] = {}
    for name in names:
        if name not in (AUTO, NGRAM):
            out[name] = load(name, target)
            continue
        out.setdefault(NGRAM, None)
        if name == AUTO and (own := DEFAULT.get(target.name)) is not None:
            try:
                out[own] = load(own, target)
            except ConfigError as error:
                log.warning("drafting without %s: %s", own, error)
    return out


def shipped() -> list[str]:
    """Names of the drafters that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.safetensors"))


def load(name: str, target: LoadedModel) -> tuple[DecoderConfig, Weights]:
    """Configuration and weights (see `jaxspec.models.drafter`) of a drafter that is a model.

    `truncated:K`, a name of `shipped()`, a `.safetensors` file of `draft.distill`, or a model `load_model` takes
    that has the target's tokenizer. Raises `ConfigError` with the reason if it does not fit the target.
    """
    if match := _TRUNCATED.match(name):
        return truncated(target, int(match[1]))
    path = SHIPPED / f"{name}.safetensors" if name in shipped() else Path(name)
    try:
        if path.suffix == ".safetensors":
            return load_drafter(path, target.config, dict(target.weights))
        other = load_model(name)
    except ModelLoadError as error:
        known = f"{NGRAM}, truncated:K, {', '.join(shipped())}" if shipped() else f"{NGRAM}, truncated:K"
        raise ConfigError(f"draft: {error} (drafters by name: {known})") from None
    if other.config.vocab_size != target.config.vocab_size or not same_tokenizer(other, target):
        raise ConfigError(f"draft: {name} has another tokenizer than {target.name}: its tokens mean something else")
    return other.config, whole(other)


def truncated(target: LoadedModel, layers: int) -> tuple[DecoderConfig, Weights]:
    """The target's first layers with its own norm and head."""
    c = target.config
    if not 1 <= layers < c.num_layers:
        raise ConfigError(
            f"draft: truncated:{layers} must keep between 1 and {c.num_layers - 1} layers of {target.name}"
        )
    kept = {f"layers.{i}" for i in range(layers)}
    weights = {k: v for k, v in whole(target).items() if not k.startswith("layers.") or k.rsplit(".", 1)[0] in kept}
    windowed = tuple(i for i in c.windowed_layers if i < layers)
    if c.windowed_layers and not windowed:
        c = replace(c, sliding_window=None)
    return replace(c, num_layers=layers, windowed_layers=windowed), weights


def whole(model: LoadedModel) -> Weights:
    """A model's weights as a drafter's, over its whole vocabulary."""
    return {
        **model.weights,
        "head": head_of(model.config, model.weights),
        "vocab": np.arange(model.config.vocab_size, dtype=np.int32),
    }


def same_tokenizer(a: LoadedModel, b: LoadedModel) -> bool:
    """Whether both cut and number text alike, judged by what they make of text with a bit of everything."""
    probe = "The quick brown fox, naïve café №1: 3.14159 + x_2 == {\n\t'y': [1, 2]}  你好 \U0001f600 don't <|im_start|>"
    return a.tokenizer.encode(probe) == b.tokenizer.encode(probe)


#: Configuration and weights of each drafter by its name, None of n-gram lookup.
Models = Mapping[str, tuple[DecoderConfig, Weights] | None]


def build(
    config: EngineConfig,
    model_runner: ModelRunner,
    models: Models,
    num_pages: int,
    warm_up: WarmUp,
    store: ProfileStore,
    clock: Callable[[], float],
) -> Speculator:
    """The speculator of these drafters, beside `model_runner`. Measured times are kept in `store`."""
    drawing = _drawing(config, models)
    devices = _devices(config, models)
    largest = model_runner.shapes[-1]
    sizes = largest.tokens, largest.trees, largest.pages
    side_by_side: list[Drafter] = []
    for name, model in models.items():
        if model is None:
            side_by_side.append(NgramDrafter())
            continue
        shapes = round_buckets(*sizes, fine=name in devices)
        runner = DraftRunner(
            name, *model, model_runner, model_runner.layers, shapes, num_pages, config.page_size, config.dtype,
            BEAMS if drawing is None else [drawing], devices.get(name), store,
        )  # fmt: skip
        needed, more = runner.jobs()
        # Who drafts for whom is chosen by what each drafter takes, and a device of its own is not idle work.
        if config.draft_choice != "fastest" or devices:
            warm_up.compile_now("compiling the drafter", [*needed, *more])
            runner.profile.measure()
        else:
            warm_up.compile_later("compiling the drafter", needed, rank=1)
            warm_up.compile_later("compiling the drafter", more, rank=4)
            warm_up.measure(runner.profile)
        side_by_side.append(ModelDrafter(runner, clock))
    step = model_runner.times
    policy = tree_policy(config, step) if drawing is None else Drawing(config.draft_depth or DEPTH)
    speculator = arrange(config, side_by_side, step, policy)
    model_runner.startup_done()
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
    return [d.runner for d in models if not d.own_device]


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
