"""Draft times of the papers' draft models on the papers' machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxspec.sched.sim.cost import (
    A100_ARITHMETIC,
    A100_BANDWIDTH,
    H200_ARITHMETIC,
    H200_BANDWIDTH,
    LLAMA2_A100,
    LLAMA_3_8B_H200,
    LLAMA_V100,
    V100_ARITHMETIC,
    V100_BANDWIDTH,
    Cost,
    Linear,
    Profiled,
)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of drafting: the draft model runs once per level. A run takes `token` seconds per token but at least
    `floor`, plus `request` seconds per request, or `position` per committed position, for reading its KV."""

    floor: float
    token: float
    request: float = 0.0
    position: float = 0.0

    def seconds(self, requests: int, uncached: int, levels: int, width: int, context: int = 0) -> float:
        """The first run computes `uncached` uncached tokens, each later one the beams of `width` nodes per request. All
        read `context` committed positions."""
        if not levels:
            return 0.0
        beam = max(self.floor, self.token * requests * width)
        first = max(self.floor, self.token * uncached)
        return first + (levels - 1) * beam + levels * (self.request * requests + self.position * context)


#: A drafter whose time is unknown or negligible.
FREE = DraftCost(0.0, 0.0)

#: AdaServe §6.1: Llama-160M-Chat, 12 layers of width 768, 1.62e8 parameters, FP16, on one A100. Its weights are read in
#: 0.3 ms, but each of its about 150 kernels takes at least a few microseconds: assumed 0.6 ms per run from a CUDA graph
#: (§5.2). Reading its KV, 36 KiB per position, is neglected.
LLAMA_160M_A100 = DraftCost(max(0.6e-3, 2 * 1.62e8 / A100_BANDWIDTH), 2 * 1.62e8 / A100_ARITHMETIC)

#: EAGLE-3 (Li et al. 2025, arXiv 2503.01840) for Llama-3.1-8B in bfloat16 on one H200. A run reads one layer of the
#: target's width, whose attention takes the token's embedding and the features side by side (8,192 x 6,144 for queries,
#: keys and values, 4,096 x 4,096 for the output, 3 x 4,096 x 14,336), and a head of 32,000 tokens; assumed 0.1 ms to
#: launch its about 25 kernels. The product that fuses the target's features, 0.05e9 parameters once a round, is
#: neglected. Its KV is that of one layer.
EAGLE3_8B_BYTES, EAGLE3_8B_KV = 2 * (8192 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 4096 * 32000), 2 * 8 * 128 * 2
EAGLE3_8B_H200 = DraftCost(
    0.1e-3 + EAGLE3_8B_BYTES / H200_BANDWIDTH, EAGLE3_8B_BYTES / H200_ARITHMETIC, position=EAGLE3_8B_KV / H200_BANDWIDTH
)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A paper's draft model: the properties that its times depend on."""

    parameters: float
    layers: int

    def cost(self, layer: float, bandwidth: float, arithmetic: float) -> DraftCost:
        """A run takes at least the longer of reading the FP16 weights and launching the kernels, `layer` seconds per
        layer."""
        floor = max(2 * self.parameters / bandwidth, layer * self.layers)
        return DraftCost(floor, 2 * self.parameters / arithmetic)


#: SPIN §VI-A gives only the sizes. LLaMA-68M (Miao et al. 2024) has 2 layers, a LLaMA of 1.1e9 parameters (TinyLlama)
#: 22, one of 1.35e9 (Sheared-LLaMA) 24. For the other two the number is assumed that fits their sizes at widths of
#: 1,024 and 1,536.
SPIN_SSMS: Mapping[str, DraftModel] = {
    "68M": DraftModel(0.068e9, 2), "265M": DraftModel(0.265e9, 16), "616M": DraftModel(0.616e9, 18),
    "1.1B": DraftModel(1.1e9, 22), "1.4B": DraftModel(1.4e9, 24),
}  # fmt: skip

#: Each on one V100 with CUDA graphs: assumed 50 microseconds per layer, as for `LLAMA_160M_A100`.
SPIN_SSM_V100: Mapping[str, DraftCost] = {
    name: model.cost(50e-6, V100_BANDWIDTH, V100_ARITHMETIC) for name, model in SPIN_SSMS.items()
}


def draft_cost(cost: Cost) -> DraftCost:
    """Draft cost that goes with a target model's cost model.

    From its profile or constants; else for the paper's smallest draft model on the same machine; else `FREE`.
    """
    if isinstance(cost, Profiled):
        return DraftCost(cost.draft_level, 0.0)
    if isinstance(cost, Linear):
        return DraftCost(cost.draft_level, 0.0, cost.draft_token)
    if cost in [machine.cost for machine in LLAMA2_A100.values()]:
        return LLAMA_160M_A100
    if cost == LLAMA_3_8B_H200.cost:
        return EAGLE3_8B_H200
    if cost in [machine.cost for machine in LLAMA_V100.values()]:
        return SPIN_SSM_V100["68M"]
    return FREE
