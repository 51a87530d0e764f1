"""Loads the drafters that the config names and builds the speculator with them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.draft.cross_vocabulary import cross_vocabulary
from jaxspec.draft.grammar import GrammarDrafter
from jaxspec.draft.growth import Draws, Expansion, Growth
from jaxspec.draft.model_drafter import ModelDrafter
from jaxspec.draft.runner import BEAMS, Device, DraftRunner, round_buckets
from jaxspec.draft.speculator import build_speculator
from jaxspec.draft.suffix import SuffixDrafter
from jaxspec.draft.suffix_memory import SuffixMemory, UnfitMemory
from jaxspec.errors import ModelLoadError, explained
from jaxspec.models.config import DecoderConfig
from jaxspec.models.decoder import head_of
from jaxspec.models.load import LoadedModel, load_model
from jaxspec.models.load.drafter_file import load_drafter
from jaxspec.models.load.weights import LazyWeights, Weights, readers_of, stored_of
from jaxspec.sched.slots import DRAFT_CHOICES, TREES
from jaxspec.sched.spec.drafter import Drafter
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.policy import DEPTH
from jaxspec.step.profiles import ProfileStore
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.runner import ModelRunner
from jaxspec.step.warmup import WarmUp

log = logging.getLogger(__name__)

NGRAM, SUFFIX, GRAMMAR, AUTO = "ngram", "suffix", "grammar", "auto"
#: Drafters without a model that `auto` stands for.
_FREE = (GRAMMAR, SUFFIX)
_TRUNCATED = re.compile(r"truncated:(\d+)\Z")
#: Folder of the drafters that ship with the package.
SHIPPED = Path(__file__).parent / "trained"


#: Target model's name -> the best shipped drafter for it.
DEFAULT = {"smollm2-135m": "smollm2-eagle"}


def load_all(names: Sequence[str], target: LoadedModel) -> dict[str, tuple[DecoderConfig, Weights] | None]:
    """Each drafter's `load` result by name, None for those without a model.

    `auto` is grammar and suffix drafting, and the shipped drafter for the target, if there is one. If that does not fit
    (the name may be another model's), a warning says so. Raises `ConfigError` if a named drafter does not fit.
    """
    out: dict[str, tuple[DecoderConfig, Weights] | None] = {}
    for name in names:
        if name not in (AUTO, NGRAM, SUFFIX, GRAMMAR):
            out[name] = load(name, target)
            continue
        out |= {free: None for free in (_FREE if name == AUTO else (name,)) if free not in out}
        if name == AUTO and (default := DEFAULT.get(target.name)) is not None:
            try:
                out[default] = load(default, target)
            except ConfigError as error:
                log.warning("drafting without %s: %s", default, error)
    # Of the drafters without a model the first one that has a proposal drafts, and the grammar's is nearly certain.
    return dict(sorted(out.items(), key=lambda item: item[0] != GRAMMAR))


def shipped() -> list[str]:
    """Names of the drafters that ship with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.safetensors"))


def load(name: str, target: LoadedModel) -> tuple[DecoderConfig, Weights]:
    """Model config and weights (see `jaxspec.models.drafter`) of a draft model.

    `name`: `truncated:K`, one of `shipped()`, a `.safetensors` file of `draft.distill`, or a model for `load_model`.
    One with another tokenizer drafts the tokens that both vocabularies have. Raises `ConfigError` with the reason if it
    cannot be loaded or does not fit the target.
    """
    if match := _TRUNCATED.match(name):
        return truncated(target, int(match[1]))
    path = SHIPPED / f"{name}.safetensors" if name in shipped() else Path(name)
    try:
        if path.suffix == ".safetensors":
            return load_drafter(path, target.config, target.weights)
        other = load_model(name)
    except ModelLoadError as error:
        known = ", ".join([NGRAM, SUFFIX, GRAMMAR, "truncated:K", *shipped()])
        raise ConfigError(f"draft: {error} (drafters by name: {known})") from None
    if other.config.vocab_size != target.config.vocab_size or not same_tokenizer(other, target):
        return cross_vocabulary(other, whole(other), target)
    return other.config, whole(other)


def truncated(target: LoadedModel, layers: int) -> tuple[DecoderConfig, Weights]:
    """The target's first `layers` layers with the target's norm and head. Raises `ConfigError` if there are not that
    many, or no layer is left out."""
    c = target.config
    if not 1 <= layers < c.num_layers:
        raise ConfigError(
            f"draft: truncated:{layers} must keep between 1 and {c.num_layers - 1} layers of {target.name}"
        )
    dropped = tuple(f"layers.{i}." for i in range(layers, c.num_layers))
    kept = {name: reader for name, reader in readers_of(whole(target)).items() if not name.startswith(dropped)}
    weights = LazyWeights(kept, stored_of(whole(target)), of_target=["embed", "head"])
    return c.first(layers), weights


def whole(model: LoadedModel) -> Weights:
    """A model's weights as a draft model's, over the whole vocabulary; read when they are used."""
    head = partial(head_of, model.config, model.weights)
    vocab = partial(np.arange, model.config.vocab_size, dtype=np.int32)
    stored = stored_of(model.weights)
    if model.config.tie_embeddings and "embed" in stored:
        stored = {**stored, "head": stored["embed"]}
    return LazyWeights({**readers_of(model.weights), "head": head, "vocab": vocab}, stored)


def same_tokenizer(a: LoadedModel, b: LoadedModel) -> bool:
    """Whether both models tokenize a sample of words, digits, code, accents, CJK and emoji alike."""
    probe = "The quick brown fox, naïve café №1: 3.14159 + x_2 == {\n\t'y': [1, 2]}  你好 \U0001f600 don't <|im_start|>"
    return a.tokenizer.encode(probe) == b.tokenizer.encode(probe)


#: Drafter's name -> model config and weights, None for those without a model.
Models = Mapping[str, tuple[DecoderConfig, Weights] | None]


def build(
    config: EngineConfig,
    model_runner: ModelRunner,
    models: Models,
    num_pages: int,
    warm_up: WarmUp,
    store: ProfileStore,
    clock: Callable[[], float],
    model_name: str,
) -> Speculator:
    """The speculator with these drafters for the target of `model_runner`, `model_name`. `store` keeps measured times.

    Compiles the draft rounds through `warm_up`. Raises `ConfigError` for settings that do not fit the drafters, and for
    a `suffix_path` that cannot be used.
    """
    drawing = _drawing(config, models)
    devices = own_devices(config, models)
    largest = model_runner.shapes[-1]
    sizes = largest.tokens, largest.trees, largest.pages
    suffixes = {name: SuffixDrafter(name, _memory(config, model_name) if name == SUFFIX else None)
                for name in (SUFFIX, NGRAM) if name in models}  # fmt: skip
    drafters: list[Drafter] = []
    for name, model in models.items():
        if name in suffixes:
            drafters.append(suffixes[name])
            continue
        if model is None and DRAFT_CHOICES.selected(config).assigns:
            log.warning("draft: %s is left out: draft_choice %s assigns drafters", name, config.draft_choice)
            continue
        if model is None:
            drafters.append(GrammarDrafter(name, next(iter(suffixes.values()), None)))
            continue
        small = model_runner.layers.sizes.small_rounds
        shapes = round_buckets(*sizes, fine=name in devices, small=small)
        runner = DraftRunner(
            name, *model, model_runner, model_runner.layers, shapes, num_pages, config.page_size, config.dtype,
            growths(config, models), devices.get(name), store,
        )  # fmt: skip
        needed, more = runner.jobs()
        # Compile and measure now for a draft choice, which compares the drafters' times, and for drafters on their own
        # devices, whose rounds are not measured in the engine's idle time.
        if DRAFT_CHOICES.selected(config).assigns or devices:
            warm_up.compile_now("compiling draft programs", [*needed, *more])
            runner.profile.measure()
        else:
            warm_up.compile_later("compiling draft programs", needed, rank=1)
            warm_up.compile_later("compiling draft programs", more, rank=4)
            warm_up.measure(runner.profile)
        drafters.append(ModelDrafter(runner, clock))
    speculator = build_speculator(config, drafters, model_runner.times, sampled=drawing is not None)
    model_runner.startup_done()
    return speculator


def _memory(config: EngineConfig, model_name: str) -> SuffixMemory | None:
    if not config.suffix_tokens:
        return None
    path = None if config.suffix_path is None else Path(config.suffix_path).expanduser()
    try:
        return SuffixMemory(config.suffix_tokens, config.suffix_shared, path, model_name)
    except OSError as error:
        raise ConfigError(f"suffix_path: cannot read {explained(error)}") from None
    except UnfitMemory as error:
        raise ConfigError(f"suffix_path: cannot use {path}: {error}; remove it, or name another file") from None


def flush(speculator: Speculator) -> None:
    """Write the files of what drafters have learned."""
    for drafter in speculator.drafters:
        if isinstance(drafter, SuffixDrafter) and drafter.memory is not None:
            drafter.memory.flush()


def own_devices(config: EngineConfig, models: Models) -> dict[str, Device]:
    """Devices of the drafters that `draft_devices` names. Raises `ConfigError` for an unknown drafter or device."""
    known = jax.devices()
    for name, number in config.draft_devices.items():
        if models.get(name) is None:
            configured = ", ".join(n for n, model in models.items() if model is not None) or "none"
            raise ConfigError(f"draft_devices: no draft model {name!r} (configured: {configured})")
        if number >= len(known):
            raise ConfigError(f"draft_devices.{name}: no device {number}, there are {len(known)}")
        if config.acceptance == "rejection" and number:
            raise ConfigError("draft_devices: acceptance: rejection needs the drafter on the target's device")
    return {name: known[number] for name, number in config.draft_devices.items()}


def runners(speculator: Speculator) -> list[DraftRunner]:
    """Runners of the draft models."""
    return [drafter.runner for drafter in speculator.drafters if isinstance(drafter, ModelDrafter)]


def _drawing(config: EngineConfig, models: Models) -> Draws | None:
    """How to draw drafts for rejection sampling, which needs a fixed tree shape; None without rejection sampling.

    Drafters without a model draw nothing: their tokens are certain, so both acceptance rules accept them with the same
    probability.
    """
    if config.acceptance != "rejection" or not any(models.values()):
        return None
    widths = TREES.selected(config).sampled_widths
    assert widths is not None  # the config is checked
    return Draws(widths)


def growths(config: EngineConfig, models: Models) -> Sequence[Growth]:
    """How draft models grow their trees: all that is compiled of them."""
    if (drawing := _drawing(config, models)) is not None:
        return [drawing]
    tree = TREES.selected(config)
    if tree.expansion:
        return [Expansion(tree.expansion[:DEPTH])]
    return BEAMS[:1] if tree.max_width == 1 else BEAMS


def allocate_distributions(config: EngineConfig, models: Models) -> DraftDistributions:
    """Memory for the distributions that drafts were drawn from, kept until they are verified; empty without rejection
    sampling.

    Raises `ConfigError` for more than one draft model: the distributions are over one draft vocabulary.
    """
    drawing = _drawing(config, models)
    if drawing is None:
        return DraftDistributions.empty()
    drawn = [model for model in models.values() if model is not None]
    if len(drawn) > 1:
        raise ConfigError("draft: acceptance: rejection works with one draft model (and ngram or suffix)")
    return DraftDistributions.zeros(
        config.max_num_seqs, DEPTH, drawing.width, jnp.array(drawn[0][1]["vocab"], jnp.int32)
    )
