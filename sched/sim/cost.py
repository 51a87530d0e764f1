"""Step costs of the simulator: linear, roofline, or profiled on the engine."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from jaxspec.sched.step_fit import fit_steps
from jaxspec.sched.timing import StepTimes, SwapCosts


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step computes, summed over its requests."""

    #: Prompt tokens, one token per decoding request, and draft tokens to verify.
    tokens: int
    #: Requests whose prompt starts in this step.
    starting: int = 0
    #: Committed KV positions that attention reads.
    context: int = 0
    #: Requests with drafts, and depth of the deepest draft: the drafter runs once per level.
    drafting: int = 0
    levels: int = 0
    #: KV positions moved between device and host because requests were paused or resumed.
    swapped: int = 0


class Cost(Protocol):
    """Cost model: seconds of a step, drafting and verification together."""

    def seconds(self, load: StepLoad) -> float: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """Seconds linear in the counts of a `StepLoad`; all constants in seconds."""

    step: float
    token: float = 0.0
    #: Added once to a step in which any prompt starts.
    start: float = 0.0
    position: float = 0.0
    #: One run of the drafter, and the addition per request in it.
    draft_level: float = 0.0
    draft_token: float = 0.0
    swap: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        return (
            self.step + self.token * load.tokens + self.start * (load.starting > 0) + self.position * load.context
            + load.levels * (self.draft_level + self.draft_token * load.drafting) + self.swap * load.swapped
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scaled:
    """Another cost model's seconds times a factor: a device that is slower than it should be."""

    cost: Cost
    factor: float

    def seconds(self, load: StepLoad) -> float:
        return self.factor * self.cost.seconds(load)


#: SSJF §4, Table 1: milliseconds per query of 512 tokens on one V100 (16 GB).
V100_QUERY_MS: Mapping[str, float] = {
    "opt-1.3b": 1243, "opt-2.7b": 2351, "gpt2-large": 832, "gpt2-xl": 1602, "codegen-350m": 357, "codegen-2b": 2507,
    "bloom-1b1": 523, "bloom-3b": 1293, "switch-base-16": 348, "switch-base-32": 402,
}  # fmt: skip


def v100(model: str) -> Linear:
    """A model of SSJF's Table 1: query latency divided by its 512 tokens. Raises ValueError for an unknown model."""
    if model not in V100_QUERY_MS:
        raise ValueError(f"no model {model!r} in SSJF's Table 1; known: {', '.join(V100_QUERY_MS)}")
    return Linear(step=V100_QUERY_MS[model] / 512 / 1e3)


#: SSJF §2's T = C + K·N with the constants of the paper's published experiments (`per_token_latency` and
#: `const_latency` of model-serving/eval.py in github.com/James-QiuHaoran/LLM-serving-with-proxy-models): vicuna-13b
#: takes 20 ms per token at any batch size, plus 100 ms once per step in which requests start. The shortest job, one
#: token, takes 120 ms, the minimum given in §4.2.
SSJF = Linear(step=0.02, start=0.1)

#: LAPS-SD §5.1: LLaMA-7B with LLaMA-68M as its draft model on an NVIDIA L20, as a roofline: weights and KV are read
#: once per step, and a token costs 2 FLOP per parameter. L20 (data sheet): 864 GB/s, 119.5 TFLOPS FP16 with tensor
#: cores, PCIe 4.0 x16 at 32 GB/s; assumed to be reached: 80 % of the bandwidths and half of the FLOPS. LLaMA-7B
#: (Touvron et al. 2023): 6.74e9 parameters, 32 layers of width 4,096, hence 0.5 MiB of FP16 KV per position. LLaMA-68M
#: (Miao et al. 2024, SpecInfer): 2 layers, for which the bandwidth would allow 0.2 ms per token, but in PyTorch kernel
#: launches dominate: assumed 1 ms. A switch moves the KV over PCIe. LAPS-SD's Fig. 2 measures 14.21 % of the time of a
#: 500-token request for switches, which these constants give at about one switch per 80 ms of service.
_BANDWIDTH, _ARITHMETIC, _PCIE = 0.8 * 864e9, 0.5 * 119.5e12, 0.8 * 32e9
_LLAMA_7B, _LLAMA_7B_KV = 6.74e9, 2 * 32 * 4096 * 2
LLAMA_7B_L20 = Linear(
    step=2 * _LLAMA_7B / _BANDWIDTH, token=2 * _LLAMA_7B / _ARITHMETIC, position=_LLAMA_7B_KV / _BANDWIDTH,
    draft_level=1e-3, swap=_LLAMA_7B_KV / _PCIE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of a step: the longer of reading the weights and computing the tokens, plus reading the KV, plus a fixed
    time to launch it."""

    weights: float
    token: float
    position: float
    launch: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        return self.launch + max(self.weights, self.token * load.tokens) + self.position * load.context


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a paper's devices: step cost, KV memory and host bandwidth."""

    cost: Roofline
    #: Bytes of KV per position, bytes of device memory for KV, bytes per second to and from the host.
    kv_bytes: float
    room: float
    bus: float

    def with_kv(self, share: float) -> Machine:
        """This machine with KV of `share` of the bytes, read as stored: 0.5 for INT8 instead of FP16."""
        cost = replace(self.cost, position=self.cost.position * share)
        return replace(self, cost=cost, kv_bytes=self.kv_bytes * share)

    @property
    def positions(self) -> int:
        """KV positions that fit the devices."""
        return int(self.room / self.kv_bytes)

    def swap_costs(self, page_size: int) -> SwapCosts:
        page = page_size * self.kv_bytes / self.bus
        return SwapCosts(page, page, self.cost.token, self.cost.weights)


#: V100, data sheet (SXM2), times the shares that are assumed to be reached (see `v100_machine`).
V100_BANDWIDTH, V100_ARITHMETIC = 0.8 * 900e9, 0.5 * 125e12


def v100_machine(parameters: float, layers: int, width: int, devices: int = 1) -> Machine:
    """A model with FP16 weights, tensor parallel on `devices` V100, as a roofline; communication is assumed to be free.

    V100 (data sheet, SXM2, 32 GB): 900 GB/s, 125 TFLOPS FP16 with tensor cores, PCIe 3.0 x16 (15.75 GB/s; ALISE's
    machine has PCIe 4.0, but a V100 supports only 3.0). Assumed to be reached: 80 % of the bandwidths and half of the
    FLOPS, as for `LLAMA_7B_L20`. KV gets 90 % of the 34.1e9 bytes minus weights and 1e9 bytes of activations, which is
    vLLM's rule.
    """
    bandwidth, arithmetic, kv = devices * V100_BANDWIDTH, devices * V100_ARITHMETIC, 2 * layers * width * 2
    cost = Roofline(2 * parameters / bandwidth, 2 * parameters / arithmetic, kv / bandwidth)
    return Machine(cost, kv, devices * (0.9 * 34.1e9 - 1e9) - 2 * parameters, devices * 0.8 * 15.75e9)


#: ALISE's models, as `v100_machine` takes them: parameters, layers and widths from Zhang et al. 2022, Table 1 (ALISE's
#: Table 1 lists those of 13B for 6.7B too), Touvron et al. 2023 (LLaMA), Table 2, and Biderman et al. 2023, Table 1.
ALISE_MODELS: Mapping[str, tuple[float, int, int]] = {
    "opt-2.7b": (2.65e9, 32, 2560), "opt-6.7b": (6.66e9, 32, 4096), "opt-13b": (12.85e9, 40, 5120),
    "llama-7b": (_LLAMA_7B, 32, 4096), "llama-13b": (13.02e9, 40, 5120), "pythia-12b": (11.85e9, 36, 5120),
}  # fmt: skip
OPT_V100 = {name: v100_machine(*sizes) for name, sizes in ALISE_MODELS.items() if name.startswith("opt")}

#: Sizes as above, 30B from the same table; number of V100 from SPIN §VI-A.
LLAMA_V100: Mapping[str, Machine] = {
    "llama-7b": v100_machine(*ALISE_MODELS["llama-7b"]),
    "llama-13b": v100_machine(*ALISE_MODELS["llama-13b"], devices=2),
    "llama-30b": v100_machine(32.53e9, 60, 6656, devices=4),
}

#: AdaServe §6.1: A100 SXM with 80 GB, 2,039 GB/s and 312 TFLOPS FP16 with tensor cores (data sheet). Assumed to be
#: reached: half of the FLOPS, as above, and 54 % of the bandwidth. With that a step of eight requests with 32 input and
#: 128 output tokens takes the 12.5 ms measured in the paper for Llama-2-7b (§6.1). FLOPS / bandwidth is then 140
#: tokens; the paper's Table 1 has 156, from the data sheet.
A100_ARITHMETIC = 0.5 * 312e12
A100_BANDWIDTH = (2 * _LLAMA_7B + 8 * (32 + 128 / 2) * _LLAMA_7B_KV) / 12.5e-3


def llama2_a100(parameters: float, kv_bytes: int, devices: int = 1) -> Machine:
    """A Llama-2 model, FP16, tensor parallel on `devices` A100; communication is assumed to be free."""
    bandwidth, arithmetic = devices * A100_BANDWIDTH, devices * A100_ARITHMETIC
    cost = Roofline(2 * parameters / bandwidth, 2 * parameters / arithmetic, kv_bytes / bandwidth)
    return Machine(cost, kv_bytes, devices * 0.9 * 80e9 - 2 * parameters - 1e9, 0.8 * 32e9)


#: Parameters, layers and heads from Touvron et al. 2023 (Llama 2); 70b has 8 KV heads of size 128. The paper uses 4
#: A100 and does not say which model ran on how many; 12.5 ms is the time of 7b on one. Fig. 6 gives 13b the same rate
#: as 7b, with nearly all SLOs met: in the simulator two A100 do that, one does not (its strict SLO is then 24 ms).
LLAMA2_A100: Mapping[str, Machine] = {
    "llama-2-7b": llama2_a100(_LLAMA_7B, _LLAMA_7B_KV),
    "llama-2-13b": llama2_a100(13.02e9, 2 * 40 * 5120 * 2, devices=2),
    "llama-2-70b": llama2_a100(68.98e9, 2 * 80 * 8 * 128 * 2, devices=4),
}

#: Llama-3.1-8B in bfloat16 on one H200. H200 SXM (data sheet): 141e9 bytes at 4.8e12 B/s, 989e12 dense FLOPS in
#: bfloat16. Assumed to be reached: 80 % of the bandwidth and half of the FLOPS, as above. Parameters and KV from Dubey
#: et al. 2024 (The Llama 3 Herd of Models), Table 3: 8.03e9, of which a step reads all but the 128,256 x 4,096 of the
#: input embedding; 32 layers of 8 KV heads of size 128. A step is one CUDA graph: assumed 0.2 ms to launch it and to
#: read its decision. PCIe 5.0 x16 at 64 GB/s. KV gets 90 % of the memory minus weights and 1e9 bytes of activations.
H200_BANDWIDTH, H200_ARITHMETIC = 0.8 * 4.8e12, 0.5 * 989e12
_LLAMA_3_8B, _LLAMA_3_8B_READ, _LLAMA_3_8B_KV = 8.03e9, 7.50e9, 2 * 32 * 8 * 128 * 2
LLAMA_3_8B_H200 = Machine(
    Roofline(
        2 * _LLAMA_3_8B_READ / H200_BANDWIDTH, 2 * _LLAMA_3_8B_READ / H200_ARITHMETIC, _LLAMA_3_8B_KV / H200_BANDWIDTH,
        launch=0.2e-3,
    ),
    _LLAMA_3_8B_KV, 0.9 * 141e9 - 2 * _LLAMA_3_8B - 1e9, 0.8 * 64e9,
)  # fmt: skip

PAPER_SCALE: Mapping[str, Cost] = {
    "ssjf": SSJF,
    "llama-7b-l20": LLAMA_7B_L20,
    **{f"{model}-v100": machine.cost for model, machine in OPT_V100.items()},
    **{f"{model}-v100": machine.cost for model, machine in LLAMA_V100.items()},
    **{f"{model}-a100": machine.cost for model, machine in LLAMA2_A100.items()},
    "llama-3.1-8b-h200": LLAMA_3_8B_H200.cost,
    **{f"v100-{model}": v100(model) for model in V100_QUERY_MS},
}


#: Shortest plausible step, and least plausible time of a step relative to a smaller one. Profiles below are rejected.
LEAST_SECONDS, FASTER = 1e-6, 0.4


@dataclass(frozen=True, slots=True)
class Profiled:
    """Step times measured on an engine: `step[i]` seconds for up to `buckets[i]` tokens, plus `position` seconds per
    context position and `draft_level` seconds per draft level.

    Beyond the largest bucket the time grows in proportion to the tokens. Raises `ValueError` naming the field that is
    wrong, or for times that cannot have been measured.
    """

    buckets: tuple[int, ...]
    step: tuple[float, ...]
    position: float = 0.0
    draft_level: float = 0.0
    #: Description of the measurement: model, machine, settings.
    about: str = ""

    def __post_init__(self) -> None:
        if not self.buckets or list(self.buckets) != sorted(set(self.buckets)) or self.buckets[0] < 1:
            raise ValueError("buckets must be ascending positive numbers of tokens")
        if len(self.step) != len(self.buckets) or not all(0 < s < inf for s in self.step):
            raise ValueError("step must give positive seconds for each of the buckets")
        if not all(0 <= s < inf for s in (self.position, self.draft_level)):
            raise ValueError("position and draft_level must be finite and not negative")
        largest = 0.0
        for size, seconds in zip(self.buckets, self.step, strict=True):
            # Noise can make a larger step slightly faster than a smaller one, but not by this much.
            if seconds < LEAST_SECONDS or seconds < FASTER * largest:
                times = ", ".join(f"{n}: {1e3 * s:.3g}" for n, s in zip(self.buckets, self.step, strict=True))
                raise ValueError(
                    f"a step of {size} tokens cannot take {1e3 * seconds:.3g} ms (milliseconds by tokens: {times}); "
                    "record the profile again"
                )
            largest = max(largest, seconds)

    def seconds(self, load: StepLoad) -> float:
        i = bisect_left(self.buckets, load.tokens)
        if i < len(self.buckets):
            step = self.step[i]
        else:
            step = self.step[-1] * load.tokens / self.buckets[-1]
        return step + self.position * load.context + self.draft_level * load.levels

    @classmethod
    def fit(cls, loads: Sequence[StepLoad], seconds: Sequence[float], buckets: Sequence[int], about: str) -> Profiled:
        """Bounded least squares over measured steps (`step_fit`), without those that a pause of the machine delayed.

        Buckets without a step are interpolated, or extrapolated in proportion to their tokens. Raises `ValueError` when
        there is nothing to fit.
        """
        if not loads or len(loads) != len(seconds):
            raise ValueError(f"{len(seconds)} times for {len(loads)} steps")
        took, sizes = np.asarray(seconds, float), np.asarray(sorted(buckets))
        place = np.minimum(np.searchsorted(sizes, [load.tokens for load in loads]), len(sizes) - 1)
        extra = np.array([[load.context, load.levels] for load in loads], float)
        timed = np.isfinite(took) & (took >= LEAST_SECONDS)  # the clock may be set back or too coarse
        if not timed.any():
            raise ValueError("no step took any time: nothing was measured")
        seen, fitted, (position, level) = fit_steps(sizes[place[timed]], extra[timed], took[timed])
        steps = np.maximum(np.interp(sizes, seen, fitted), LEAST_SECONDS)
        beyond = sizes > seen[-1]
        steps[beyond] = fitted[-1] * sizes[beyond] / seen[-1]
        return cls(tuple(sizes.tolist()), tuple(steps.tolist()), float(position), float(level), about)

    def save(self, path: str | Path) -> None:
        """Raises OSError."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load_profile(path: str | Path) -> Profiled:
    """Load a file written by `Profiled.save`. Raises OSError, or ValueError naming the field that is wrong."""
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        values = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
        known = {f.name for f in fields(Profiled)}
        if not set(values) <= known or not {"buckets", "step"} <= set(values):
            raise ValueError(f"needs the fields buckets and step, and may have {', '.join(sorted(known))}")
        buckets, step = [int(b) for b in values.pop("buckets")], [float(s) for s in values.pop("step")]
        return Profiled(tuple(buckets), tuple(step), **values)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"profile {path}: {error!s:.300}") from None


def load_cost(name: str) -> Cost:
    """The cost model of this name in `PAPER_SCALE`, or of a profile's file. Raises OSError or ValueError."""
    if name in PAPER_SCALE:
        return PAPER_SCALE[name]
    if not Path(name).exists():
        raise ValueError(f"no cost model {name!r}: give a profile's file or one of {', '.join(PAPER_SCALE)}")
    return load_profile(name)


#: Committed positions of the sample with a context.
CONTEXT = 1024


def step_times(cost: Cost, largest: int) -> StepTimes:
    """`StepTimes` of steps of up to `largest` tokens, sampled at increasing sizes without drafting, and at one size
    with a context."""
    sizes = {1, *range(8, 256, 8), *range(256, largest, 64), largest}
    position = cost.seconds(StepLoad(1, context=CONTEXT)) - cost.seconds(StepLoad(1))
    return StepTimes({n: cost.seconds(StepLoad(n)) for n in sizes if n <= largest}, max(0.0, position) / CONTEXT)
