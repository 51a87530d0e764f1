"""Settings of an engine: a YAML preset with overrides, validated; errors name the bad keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError, ValidationInfo, field_validator

from jaxspec.errors import reason
from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.slots import MEMORIES, Need


class ConfigError(ValueError):
    """A setting is unknown, out of range, or does not fit the others or the model; the message names it."""


class EngineConfig(PolicyConfig):
    """All settings of an engine, including its scheduling policy. docs/configuration.md explains them."""

    #: Target model: built-in name, Hugging Face folder, .gguf file or hub id (owner/name, or owner/name:Q4_K_M for a
    #: .gguf file).
    model: str = "smollm2-135m"
    #: Branch, tag or commit of a `model` from the hub. None: its main branch.
    revision: str | None = None
    #: Sampling parameters of HTTP requests that do not set them. auto: those of the model's generation_config.json.
    #: none: the API's defaults.
    generation_config: Literal["auto", "none"] = "auto"
    #: Model names in the API; requests may use any of them, metrics have the first. Empty: the model's own.
    served_model_name: list[str] = Field(default_factory=list[str])
    #: Drafters: "suffix" (suffix drafting: in the request's text and in earlier answers), "ngram" (n-gram lookup: in
    #: its text only), "grammar" (what a structured output leaves no choice about), "truncated:K" (the target's first K
    #: layers), a trained drafter's name or file, or another model (with another tokenizer, it drafts the tokens that
    #: both have). "auto": grammar, suffix and, if the package has one for the model, a trained drafter. "none" or an
    #: empty list: no speculation.
    draft: list[str] = Field(default_factory=lambda: ["auto"])
    #: Draft models on a device of their own: index into JAX's devices, by drafter name. The target is on device 0.
    draft_devices: dict[str, NonNegativeInt] = Field(default_factory=dict[str, NonNegativeInt])
    #: Devices that weights, KV heads and drafters are split over (tensor parallelism): JAX's first ones. All steps run
    #: on all of them.
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    #: Micro-batches of a step: one is drafted on `draft_devices` while another is verified. None: the fastest number by
    #: profiled times (SPIN §V-B).
    micro_batches: PositiveInt | None = Field(default=None, le=8)
    #: Draft models on devices of their own: whether two groups of requests take turns, one drafted while the other is
    #: verified. None: where profiled times say that it pays.
    draft_turns: bool | None = None
    #: Plan a step while the one before runs: with drafts, penalties or constraints its results come first. None: on
    #: accelerators.
    async_scheduling: bool | None = None
    #: Data type of weights and KV. auto: bfloat16 on a GPU, float32 elsewhere. The native kernels need float32.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: Maximum prompt plus output tokens of a request. None, or more than the model supports: the model's limit.
    max_model_len: PositiveInt | None = None
    #: Maximum number of running requests.
    max_num_seqs: PositiveInt = Field(default=64, le=1024)
    #: Token budget of a step, at least max_num_seqs: a token per decoding request, the rest for prefill and drafts.
    #: None: 2048 on a GPU, else 256.
    max_num_batched_tokens: PositiveInt | None = Field(default=None, le=8192)
    #: Maximum number of waiting requests. The server refuses more; `LLM` waits.
    max_queued_requests: PositiveInt = 256
    #: Maximum expected wait of a request in milliseconds: further requests are refused as if the queue were full. None:
    #: any wait. The expectation is the number of waiting requests times the mean time between the ends of the latest
    #: requests that ended while others waited.
    max_queue_wait_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    #: Positions per KV page.
    page_size: Literal[16, 32, 64, 128] = 32
    #: Share of a GPU's memory that the engine takes for weights, KV and programs; the KV pool gets what is left of it.
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1, allow_inf_nan=False)
    #: Size of the KV pool in tokens. None: what fits in gpu_memory_utilization of the GPU; on CPUs, enough for 64
    #: requests of 512 tokens and for one of max_model_len, but at most 40 % of the host's available memory.
    kv_cache_tokens: PositiveInt | None = None
    #: Whether requests share the KV of equal prompt prefixes.
    enable_prefix_caching: bool = True
    #: Data type of the target's KV pool. auto: `dtype`. bfloat16: half of float32's size on CPUs; outputs are those of
    #: plain decoding with such KV. int8: INT8 per channel; outputs are then not exact.
    kv_cache_dtype: Literal["auto", "bfloat16", "int8"] = "auto"
    #: `memory: swap`, `auto`: maximum host memory for swapped KV, in GiB; at most half of what is available. 0: none.
    swap_space: float = Field(default=1.0, ge=0, le=65536, allow_inf_nan=False)
    #: Data type of swapped KV. same: as in the pool. int8: INT8 per channel; outputs are then not exact.
    swap_dtype: Literal["same", "int8"] = "same"
    #: Step sizes to compile, in tokens; max_num_batched_tokens is always added. None: 20 sizes from 1 to 2048, on a GPU
    #: 10 from 16 to 8192.
    token_buckets: list[PositiveInt] | None = None
    #: Implementation of the layers. native: C kernels for CPUs. xla: XLA operations. auto: native where possible; on
    #: GPUs XLA's products and an attention kernel of its own.
    kernels: Literal["auto", "native", "xla"] = "auto"
    #: CPUs with AMX. True: the bits of a token's logits do not depend on the rest of its step. False: products of up to
    #: 4 rows use no tiles, which is mostly faster, in another order of sums.
    batch_invariant: bool = True
    #: `draft: suffix`: tokens of earlier answers that are remembered, in memory, for each API key. 0: none, only the
    #: request's own text is searched.
    suffix_tokens: int = Field(default=131_072, ge=0, le=2**24)
    #: Whether drafts are made of answers to all API keys, not only to the request's own.
    suffix_shared: bool = False
    #: File that keeps these answers across restarts, written when the engine stops. None: they are in memory only.
    suffix_path: str | None = None
    #: Probe that predicts lengths again while answers are generated, from the target's hidden states: a file made by
    #: `jaxspec.train_predictor.probe`, or one in the package by name. auto: the one in the package for the model, if a
    #: policy reads lengths. None: lengths are predicted once.
    length_probe: str | None = None
    #: Output tokens of a request between two of its predictions.
    length_probe_every: int = Field(default=32, ge=1, le=4096)
    #: How the model writes tool calls. auto: as its chat template shows; hermes if it shows none.
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "mistral_args"] = "auto"
    #: Whether chat answers have their reasoning in a field of its own. auto: if the model's chat template has its tags.
    reasoning_parser: Literal["auto", "none"] = "auto"
    #: Requests without a seed draw theirs from a generator with this seed.
    seed: int = 0
    #: True: serve after the first three step sizes are compiled, and compile the rest, the drafters and the length
    #: predictor in the background. False: compile and profile everything first, as benchmarks do.
    compile_in_background: bool = True
    #: Folder of JAX's persistent compilation cache. None: `compiled` in the cache folder. "": neither compiled programs
    #: nor profiles are kept.
    compilation_cache_dir: str | None = None

    @property
    def token_budget(self) -> int:
        """max_num_batched_tokens, or its default: on a GPU `engine.startup.for_device` has set it."""
        return self.max_num_batched_tokens or max(256, self.max_num_seqs)

    @property
    def policy(self) -> PolicyConfig:
        """The scheduler's part of the settings."""
        return PolicyConfig(**{name: getattr(self, name) for name in PolicyConfig.model_fields})

    @field_validator("draft", mode="before")
    @classmethod
    def _to_list(cls, value: Any) -> Any:
        """A single drafter may be given without brackets; `none` stands for an empty list."""
        if value in (None, "none", ["none"]):
            return []
        return [value] if isinstance(value, str) else value

    @field_validator("draft")
    @classmethod
    def _check_draft(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("a drafter's name is empty; use none for no speculation")
        if len(set(value)) < len(value):
            raise ValueError("a drafter is named twice")
        if "none" in value:
            raise ValueError("none cannot be combined with other drafters")
        return value

    @field_validator("tensor_parallel_size")
    @classmethod
    def _check_parallel(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("draft_devices"):
            raise ValueError("drafters are split over the same devices; remove draft_devices")
        return value

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else [] if value is None else value

    @field_validator("served_model_name")
    @classmethod
    def _check_names(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("a model name is empty")
        return list(dict.fromkeys(value))

    @field_validator("swap_space")
    @classmethod
    def _check_swap_space(cls, value: float, info: ValidationInfo) -> float:
        memory = info.data.get("memory")
        if value == 0 and memory is not None and Need.HOST_MEMORY in MEMORIES[memory].needs:
            raise ValueError(f"memory: {memory} needs host memory")
        return value

    @classmethod
    def load(cls, path: str | Path | None = None, /, **overrides: Any) -> EngineConfig:
        """Read a preset, a YAML mapping, and apply overrides. Raises `ConfigError` naming every bad key or value."""
        return load_settings(cls, path, overrides)


#: Unknown settings get all valid names as a hint if there are at most this many, or if none is similar.
_MAX_LISTED = 12
#: Setting by its former name or its name in vLLM or SGLang, for hints.
_OTHER_NAMES = {
    "adaserve.most_nodes": "adaserve.max_nodes",
    "block_size": "page_size",
    "chunked_prefill_size": "max_num_batched_tokens",
    "compilation_cache": "compilation_cache_dir",
    "context_length": "max_model_len",
    "draft_budget": "verify_budget",
    "draft_levels": "draft_depth",
    "draft_model": "draft",
    "mem_fraction_static": "gpu_memory_utilization",
    "kv_dtype": "kv_cache_dtype",
    "max_running_requests": "max_num_seqs",
    "max_total_tokens": "kv_cache_tokens",
    "max_waiting": "max_queued_requests",
    "num_speculative_tokens": "draft_depth",
    "preemption_mode": "memory",
    "prefix_caching": "enable_prefix_caching",
    "random_seed": "seed",
    "schedule_policy": "order",
    "scheduling_policy": "order",
    "speculative_config": "draft",
    "speculative_model": "draft",
    "speculative_num_steps": "draft_depth",
    "swap_space_gb": "swap_space",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
}

#: Most problems that a message names.
_MAX_TOLD = 10

S = TypeVar("S", bound=BaseModel)


def load_settings(
    schema: type[S],
    path: str | Path | None,
    overrides: Mapping[str, Any],
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> S:
    """Validate the YAML mapping at `path` (None: empty) with overrides. `defaults`: from these settings, defaults of
    others. Raises `ConfigError` naming every bad key or value."""
    settings: Any = {}
    if path is not None:
        try:
            settings = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
            raise ConfigError(f"cannot read config {path}: {reason(error):.1000}") from None
        if not isinstance(settings, dict):
            raise ConfigError(f"config {path} must be a mapping of settings, got {type(settings).__name__}")
    given = merged({str(k): v for k, v in settings.items()}, overrides)
    try:
        return schema(**(given if defaults is None else {**defaults(given), **given}))
    except ValidationError as error:
        told = [_explain(e, schema) for e in error.errors()]
        more = [f"and {len(told) - _MAX_TOLD} more"] if len(told) > _MAX_TOLD else []
        raise ConfigError("; ".join(told[:_MAX_TOLD] + more)) from None


def merged(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Both together; overrides win, nested mappings are merged key by key."""
    out = dict(settings)
    for key, value in overrides.items():
        current = out.get(key)
        if isinstance(current, Mapping) and isinstance(value, Mapping):
            value = merged(current, value)
        out[key] = value
    return out


def _explain(error: Any, schema: type[BaseModel]) -> str:
    """One pydantic error as a message."""
    name = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            return _unknown(name, _names(schema, error["loc"][:-1]))
        case "missing":
            return f"{name}: this setting is needed"
        case "model_type":
            names = ", ".join(_names(schema, error["loc"]))
            return f"{name} is a section with the settings {names} (got {error['input']!r:.200})"
        case "value_error" if isinstance(error["input"], Mapping):  # settings that don't fit each other
            return f"{name}: {error['ctx']['error']}".removeprefix(": ")
        case _:
            return f"{name}: {error['msg'].removeprefix('Value error, ')} (got {error['input']!r:.200})"


def settings_like(name: str, known: Sequence[str] | None = None) -> list[str]:
    """Settings among `known` (default: all of `EngineConfig`) that `name` may stand for, the likeliest first."""
    known = _names(EngineConfig, ()) if known is None else known
    if (called := _OTHER_NAMES.get(name, name)) in known:
        return [called]
    by_lowercase = {n.lower(): n for n in known}
    return [by_lowercase[n] for n in get_close_matches(name.lower(), by_lowercase, n=3, cutoff=0.75)]


def _unknown(name: str, known: Sequence[str]) -> str:
    """Message for an unknown setting: similar names, and all valid ones if the list is short or none is similar."""
    if _OTHER_NAMES.get(name) in known:
        return f"unknown setting {name!r}; use {_OTHER_NAMES[name]} here"
    similar = settings_like(name, known)
    hint = f"did you mean {' or '.join(similar)}?" if similar else ""
    if similar and len(known) > _MAX_LISTED:
        return f"unknown setting {name!r}; {hint}"
    return f"unknown setting {name!r}; valid settings: {', '.join(known)}" + (f" ({hint})" if hint else "")


def _names(schema: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Full names of the settings in the section at `path`, inherited ones last."""
    prefix = "".join(f"{part}." for part in path)
    for part in path:
        schema = schema.model_fields[part].annotation  # type: ignore[assignment]
    own = [name for name in schema.model_fields if name in schema.__annotations__]
    return [prefix + name for name in dict.fromkeys([*own, *schema.model_fields])]


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse `["key=value", "section.key=value", …]` with YAML values for `EngineConfig.load`. Raises `ConfigError`."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"expected key=value, got {pair!r}")
        try:
            setting = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{key}: not a YAML value: {value!r} ({error})") from None
        for part in reversed(key.strip().split(".")):
            setting = {part: setting}
        out = merged(out, setting)
    return out


def http_url(text: str) -> str:
    """The URL. Raises ValueError for another text."""
    url = urlsplit(text)
    if url.scheme in ("http", "https") and url.hostname:
        return text
    raise ValueError(f"must be a URL with http:// or https://, got {text!r}")
