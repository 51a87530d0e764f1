"""The engine's configuration: a YAML preset, overridden by keywords or `key=value` strings, every name checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError, ValidationInfo, field_validator

from jaxspec.errors import reason
from jaxspec.sched.config import EpsilonGreedySettings, LbssSettings, PolicyConfig, Section


class ConfigError(ValueError):
    """A setting that does not exist or does not fit; the message names it."""


class AdaServeSettings(Section):
    """`tree: adaserve`: draft tokens by latency targets (AdaServe §4.3)."""

    #: Most draft nodes that a request gets for its target in a step (n_max).
    max_nodes: PositiveInt = 16
    #: Draft, and fill the budget, only as far as that raises the expected tokens per second or brings requests back to
    #: their targets; false: always and all of it, as in the paper.
    economic: bool = True


class EngineConfig(PolicyConfig):
    """Settings of one engine, those of its scheduling policy included; see docs/configuration.md.

    Sizes are in tokens unless they say otherwise.
    """

    #: Built-in name, Hugging Face directory, .gguf file or hub id.
    model: str = "smollm2-135m"
    #: The name clients use; the model's own if unset.
    served_model_name: str | None = None
    #: Drafters: "ngram", "truncated:K", a trained one's name or file, or a model with the same tokenizer; of several,
    #: each request gets the one it should be fastest with. "auto": ngram, and the trained one that comes with the
    #: package for the model, if there is one. "none" or an empty list: no drafting.
    draft: list[str] = Field(default_factory=lambda: ["auto"])
    #: Who drafts for a request. fastest: by expected speed, the next best where one has nothing; single: the first;
    #: greedy: by its prompt's length, the small ones for short ones; epsilon_greedy: the one that did best for all so
    #: far, or at random; lbss: what the bandit of SPIN §IV learns of the request.
    draft_choice: Literal["fastest", "single", "greedy", "epsilon_greedy", "lbss"] = "fastest"
    #: With a choice: requests that a drafter drafts for at once, by its name (SPIN's B_j); others take all.
    draft_limits: dict[str, PositiveInt] = Field(default_factory=dict)
    lbss: LbssSettings = LbssSettings()
    epsilon_greedy: EpsilonGreedySettings = EpsilonGreedySettings()
    #: Draft models that run on a device of their own, by name: its number among JAX's devices. The target has 0.
    draft_devices: dict[str, NonNegativeInt] = Field(default_factory=dict)
    #: Parts of a step, so that one is drafted while another is verified where `draft_devices` allows it; unset: as many
    #: as pay by measured times (SPIN §V-B).
    micro_batches: PositiveInt | None = Field(default=None, le=8)
    #: What of a drafter's candidates is verified; "auto": what raises the expected tokens per second.
    tree: Literal["auto", "chain", "fixed", "equal_greedy", "global_greedy", "adaserve"] = "auto"
    #: Most levels drafted: all of them with chain and fixed.
    draft_depth: PositiveInt | None = None
    #: Draft nodes of equal_greedy and global_greedy in a step; unset: what `verify_budget` leaves.
    draft_nodes: PositiveInt | None = None
    #: Tokens of a step, drafts included, up to which it is not much slower (AdaServe's B); unset: as profiled.
    verify_budget: PositiveInt | None = None
    #: equal_greedy, global_greedy, adaserve: whether a draft's chances are as learned or as its drafter says.
    draft_calibration: bool = True
    adaserve: AdaServeSettings = AdaServeSettings()
    #: When a draft token is accepted: "match", where the target chose the same; "rejection": by the chance that keeps
    #: the target's distribution.
    acceptance: Literal["match", "rejection"] = "match"
    dtype: Literal["float32", "bfloat16"] = "float32"
    #: Longest prompt and output together; the model's own limit if unset.
    max_model_len: PositiveInt | None = None
    #: Requests that run at once.
    max_num_seqs: PositiveInt = Field(64, le=1024)
    #: Token budget of a step: decoding requests take one each, prefill chunks the rest.
    max_num_batched_tokens: PositiveInt = Field(256, le=2048)
    #: Requests that may wait; more are refused.
    max_queued_requests: PositiveInt = 256
    #: Positions of a KV page.
    page_size: Literal[16, 32, 64, 128] = 32
    #: Size of the KV pool; unset: what 64 half-kilotoken requests need, at most 40 % of free memory.
    kv_cache_tokens: PositiveInt | None = None
    enable_prefix_caching: bool = True
    #: What the target's KV pool holds: numbers of `dtype`, or INT8 by channels, with which no answer is exact.
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    #: Most GiB of host memory for KV that had to leave the pool (`memory: swap`, `auto`), within half of what is free.
    swap_space: float = Field(default=1.0, ge=0, le=65536, allow_inf_nan=False)
    #: How it is kept there: as it was, or INT8 by channels.
    swap_dtype: Literal["same", "int8"] = "same"
    #: Step sizes to compile; unset: a ladder up to max_num_batched_tokens.
    token_buckets: list[PositiveInt] | None = None
    #: What layers run on: the project's CPU kernels ("native"), XLA's operations, or the first where it can serve.
    kernels: Literal["auto", "native", "xla"] = "auto"
    #: Seeds requests that name none.
    seed: int = 0
    #: Serve as soon as a few step sizes are compiled, and compile the other ones, the drafters and the length predictor
    #: in the background; false: compile and measure everything first, as benchmarks do.
    compile_in_background: bool = True
    #: Folder of JAX's persistent compilation cache; "" switches it off, unset: beside the model cache.
    compilation_cache_dir: str | None = None

    @property
    def policy(self) -> PolicyConfig:
        """The scheduler's share of the settings."""
        return PolicyConfig(**{name: getattr(self, name) for name in PolicyConfig.model_fields})

    @field_validator("draft", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """A single name needs no brackets, and `none` is how a command line says "no drafter"."""
        if value in (None, "none", ["none"]):
            return []
        return [value] if isinstance(value, str) else value

    @field_validator("draft")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("a drafter's name is empty; none switches drafting off")
        if len(set(value)) < len(value):
            raise ValueError("a drafter is named twice")
        if "none" in value:
            raise ValueError("none cannot stand beside other drafters")
        return value

    @field_validator("acceptance")
    @classmethod
    def _drawn_before(cls, value: str, info: ValidationInfo) -> str:
        """Trees whose nodes are picked by what was drawn in them would skew the distribution."""
        tree = info.data.get("tree")
        if value == "rejection" and tree not in ("auto", "chain", "fixed"):
            raise ValueError(f"rejection works with tree: auto, chain or fixed, not {tree}")
        return value

    @field_validator("swap_space")
    @classmethod
    def _room_to_swap(cls, value: float, info: ValidationInfo) -> float:
        if value == 0 and info.data.get("memory") == "swap":
            raise ValueError("memory: swap needs room on the host")
        return value

    @classmethod
    def load(cls, path: str | Path | None = None, /, **overrides: Any) -> EngineConfig:
        """Read a preset (YAML mapping) and apply overrides. Raises `ConfigError` naming every bad key or value."""
        return load_settings(cls, path, overrides)


#: Settings of a section that are listed where one of them was misspelt.
MOST_LISTED = 12
#: Former names of settings, and other engines' names for them.
CALLED = {
    "adaserve.most_nodes": "adaserve.max_nodes",
    "block_size": "page_size",
    "chunked_prefill_size": "max_num_batched_tokens",
    "compilation_cache": "compilation_cache_dir",
    "context_length": "max_model_len",
    "draft_budget": "verify_budget",
    "draft_levels": "draft_depth",
    "draft_model": "draft",
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
}

S = TypeVar("S", bound=BaseModel)


def load_settings(kind: type[S], path: str | Path | None, overrides: Mapping[str, Any]) -> S:
    """A YAML mapping (none: empty) with overrides as `kind`. Raises `ConfigError` naming every bad key or value."""
    settings: Any = {}
    if path is not None:
        try:
            settings = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read config {path}: {reason(error)}") from None
        if not isinstance(settings, dict):
            raise ConfigError(f"config {path} must be a mapping of settings, got {type(settings).__name__}")
    try:
        return kind(**_merged({str(k): v for k, v in settings.items()}, overrides))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e, kind) for e in error.errors())) from None


def _merged(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides win; where both hold a mapping, key by key."""
    out = dict(settings)
    for key, value in overrides.items():
        below = out.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = _merged(below, value)
        out[key] = value
    return out


def _explain(error: Any, kind: type[BaseModel]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            return _unknown(name, _names(kind, error["loc"][:-1]))
        case "missing":
            return f"{name}: this setting is needed"
        case "model_type":
            return f"{name} has settings of its own: {', '.join(_names(kind, error['loc']))} (got {error['input']!r})"
        case "value_error" if isinstance(error["input"], Mapping):  # settings that don't fit each other
            return f"{name}: {error['ctx']['error']}".removeprefix(": ")
        case _:
            return f"{name}: {error['msg'].removeprefix('Value error, ')} (got {error['input']!r})"


def _unknown(name: str, known: Sequence[str]) -> str:
    """What was probably meant; without a guess, and where the list is short, all that there is."""
    if CALLED.get(name) in known:
        return f"unknown setting {name!r}; it is called {CALLED[name]} here"
    by_case = {n.lower(): n for n in known}
    near = [by_case[n] for n in get_close_matches(name.lower(), by_case, n=3, cutoff=0.75)]
    guess = f"did you mean {' or '.join(near)}?" if near else ""
    if near and len(known) > MOST_LISTED:
        return f"unknown setting {name!r}; {guess}"
    return f"unknown setting {name!r}; valid settings: {', '.join(known)}" + (f" ({guess})" if guess else "")


def _names(kind: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Settings of a section, those inherited last."""
    prefix = "".join(f"{part}." for part in path)
    for part in path:
        kind = kind.model_fields[part].annotation  # type: ignore[assignment]
    own = [name for name in kind.model_fields if name in kind.__annotations__]
    return [prefix + name for name in dict.fromkeys([*own, *kind.model_fields])]


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """`["key=value", "section.key=value", …]` with YAML values -> a dict for `EngineConfig.load`."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"expected key=value, got {pair!r}")
        try:
            setting = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{key}: not a YAML value: {value!r} ({error})") from None
        for part in reversed(key.strip().split(".")):
            setting = {part: setting}
        out = _merged(out, setting)
    return out
