"""Building an engine: load the models, compile the programs, measure step times, create the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import jax

from jaxspec.compilation import without_symbols
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.draft import registry as drafters
from jaxspec.draft.registry import allocate_distributions, build, runners
from jaxspec.engine.default_sampling import with_defaults
from jaxspec.engine.pool_size import kv_pool_pages
from jaxspec.models.load import LoadedModel, load_model
from jaxspec.models.load.weights import LazyWeights, Weights, readers_of, stored_of
from jaxspec.paths import cache_folder
from jaxspec.predict.build import build as build_predictions
from jaxspec.predict.predictor import LengthPredictor
from jaxspec.predict.probe import build as build_probe
from jaxspec.predict.service import NoPredictions, PredictionService
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.reprediction import Repredictor
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.step.device_memory import claim_memory, gib
from jaxspec.step.kv_host import HostKVCache, host_kv_cache, swap_costs, swap_pages
from jaxspec.step.probe import ProbeRunner
from jaxspec.step.profiles import ProfileStore
from jaxspec.step.runner import ModelRunner
from jaxspec.step.tensor_parallel import parallel_over
from jaxspec.step.warmup import CompileJob, Progress, WarmUp

log = logging.getLogger(__name__)

#: Default of max_num_batched_tokens on GPUs: a step of this many tokens is bound by compute on all of them. At least
#: the largest max_num_seqs.
GPU_TOKEN_BUDGET = 2048


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a running engine."""

    model: LoadedModel
    max_model_len: int
    warm_up: WarmUp
    model_runner: ModelRunner
    speculator: Speculator
    host: HostKVCache
    pool: PagePool
    scheduler: Scheduler
    predictions: PredictionService | NoPredictions
    repredictor: Repredictor | None = None


def for_device(config: EngineConfig) -> EngineConfig:
    """The settings with those resolved that depend on the device: `dtype: auto`, the default token budget and
    `async_scheduling`.

    Initialises JAX's devices, and first decides how much of their memory JAX takes. Raises `ConfigError` for a KV data
    type that the device does not support, and for more devices than there are.
    """
    claim_memory(config.gpu_memory_utilization)
    without_symbols()
    parallel_over(config.tensor_parallel_size)  # checks the number of devices before anything is loaded
    gpu = jax.default_backend() == "gpu"
    dtype = ("bfloat16" if gpu else "float32") if config.dtype == "auto" else config.dtype
    if gpu and config.kv_cache_dtype == "bfloat16" != dtype:
        raise ConfigError(f"kv_cache_dtype: bfloat16 with dtype: {dtype} is for CPUs; on a GPU set dtype: bfloat16")
    budget = config.max_num_batched_tokens or (GPU_TOKEN_BUDGET if gpu else config.token_budget)
    ahead = jax.default_backend() != "cpu" if config.async_scheduling is None else config.async_scheduling
    return config.model_copy(update={"dtype": dtype, "max_num_batched_tokens": budget, "async_scheduling": ahead})


def _reported(weights: Weights, progress: Progress) -> LazyWeights:
    """The weights; `progress` is told of each that is read."""
    stage, total, done = "loading weights", len(weights), count(1)
    progress(stage, 0, total)
    lazy = LazyWeights(readers_of(weights), stored_of(weights))
    return lazy.watched(lambda _: progress(stage, next(done), total))


def start_up(
    config: EngineConfig,
    model: LoadedModel | None,
    proxy: LengthPredictor | None,
    progress: Progress,
    clock: Callable[[], float],
    renew_profiles: bool = False,
) -> Parts:
    """Load the models, compile and measure. With `compile_in_background`, only what the first request needs.

    `config` is from `for_device`. Raises `ConfigError` and `ModelLoadError`.
    """
    if config.token_budget < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({config.token_budget}) must be at least max_num_seqs "
            f"({config.max_num_seqs}): every running request decodes in every step"
        )
    progress("opening the model", 0, 1)
    loaded = with_defaults(model or load_model(config.model, config.revision), config.generation_config)
    progress("opening the model", 1, 1)
    log.info("weights and KV of %s are %s", loaded.name, config.dtype)
    predictions = build_predictions(config, loaded, clock, proxy)
    models = drafters.load_all(config.draft, loaded)
    probe = build_probe(config, loaded)
    reads_features = probe is not None or any("mix" in weights for _, weights in filter(None, models.values()))
    pages = kv_pool_pages(config, loaded.config, config.dtype, models, reads_features)
    longest = loaded.config.max_position
    max_model_len = min(config.max_model_len or longest, longest, pages * config.page_size)
    loaded = replace(loaded, config=loaded.config.for_length(max_model_len))
    models = {name: m and (m[0].for_length(max_model_len), m[1]) for name, m in models.items()}
    warm_up = WarmUp(config.compile_in_background, progress, clock, config.compilation_cache_dir != "")
    folder = cache_folder("profiles") if config.compilation_cache_dir != "" else None
    store = ProfileStore(folder, renew_profiles, clock)
    drawn = allocate_distributions(config, models)
    model_runner = ModelRunner(
        config, loaded.config, _reported(loaded.weights, progress), pages, warm_up, reads_features, drawn, store
    )  # fmt: skip
    if models:
        speculator = build(config, model_runner, models, pages, warm_up, store, clock, loaded.name)
    else:
        speculator = Speculator([], model_runner.times)
    if model_runner.layers.parallel is not None:
        held = [model_runner.held(), *(runner.held() for runner in runners(speculator))]
        for device in held[0]:
            size = gib(sum(each[device] for each in held))
            log.info("%s holds %s: its part of weights, KV pool and drafters", device, size)
    # The KV of a drafter on a device of its own is not swapped: it is computed again.
    swapped = [runner for runner in runners(speculator) if not runner.own_device]
    host = host_kv_cache(config, model_runner, swapped, warm_up, store)
    if isinstance(predictions, PredictionService):
        predictions.set_paused(True)
        stage = "compiling the length predictor"
        warm_up.compile_later(stage, [CompileJob(name, job) for name, job in predictions.programs()], rank=2)
        # Also after a failure: a request then fails the same way, and that is reported.
        resume = partial(predictions.set_paused, False)
        last = CompileJob("length predictor", predictions.warm_up, lambda _: resume(), failed=resume)
        warm_up.compile_later(stage, [last], rank=2)
    model_runner.startup_done()
    if model_runner.profile.measured:
        log.info("step times were measured %s", model_runner.profile.measured.strftime("%Y-%m-%d %H:%M UTC"))
    pool = PagePool(pages, config.page_size, config.enable_prefix_caching)
    costs = swap_costs(config, model_runner, host)
    limits = SchedulerConfig(
        config.max_num_seqs, config.token_budget, max_model_len, None, model_runner.shapes[-1].rows,
        config.policy, host.num_pages, not host.quantized, costs, swap_pages(host, costs), model_runner.times,
    )  # fmt: skip
    try:
        scheduler = Scheduler(limits, pool)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    repredictor = None
    if probe is not None:
        runner = ProbeRunner(probe, model_runner, config.max_num_seqs, config.page_size)
        model_runner.startup_done()
        repredictor = Repredictor(scheduler, config.length_probe_every, runner.left_of)
    return Parts(
        loaded, max_model_len, warm_up, model_runner, speculator, host, pool, scheduler, predictions, repredictor
    )  # fmt: skip
