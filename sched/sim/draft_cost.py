"""How long a draft model takes at the scale of a paper's machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxspec.sched.sim.cost import (
    A100_ARITHMETIC,
    A100_BANDWIDTH,
    LLAMA2_A100,
    LLAMA_V100,
    V100_ARITHMETIC,
    V100_BANDWIDTH,
    Cost,
    Linear,
    Profiled,
)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of a round of drafting: its model runs once a level, and no run takes less than `floor`. Each request
    adds `request` to a run: its KV is read."""

    floor: float
    token: float
    request: float = 0.0

    def seconds(self, requests: int, catch_up: int, levels: int, width: int) -> float:
        """The first run sees what the model has not seen yet, `catch_up` tokens; each later one the beams."""
        if not levels:
            return 0.0
        beam = max(self.floor, self.token * requests * width)
        first = max(self.floor, self.token * catch_up)
        return first + (levels - 1) * beam + levels * self.request * requests


#: A drafter whose time is not known, or that takes next to none.
FREE = DraftCost(0.0, 0.0)

#: AdaServe §6.1: Llama-160M-Chat, 12 layers of width 768, 1.62e8 parameters, FP16, on one A100. Its weights are read in
#: 0.3 ms, but each of its some 150 kernels takes a few microseconds however little it computes: assumed 0.6 ms a run
#: from a CUDA graph (§5.2). Reading its KV, 36 KiB a position, is left out.
LLAMA_160M_A100 = DraftCost(max(0.6e-3, 2 * 1.62e8 / A100_BANDWIDTH), 2 * 1.62e8 / A100_ARITHMETIC)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model of a paper, by what its times depend on."""

    parameters: float
    layers: int

    def cost(self, layer: float, bandwidth: float, arithmetic: float) -> DraftCost:
        """FP16 weights are read once a run, or the kernels launched, `layer` seconds a layer, whichever is longer."""
        floor = max(2 * self.parameters / bandwidth, layer * self.layers)
        return DraftCost(floor, 2 * self.parameters / arithmetic)


#: SPIN §VI-A gives the sizes alone. LLaMA-68M (Miao et al. 2024) has 2 layers, a LLaMA of 1.1e9 parameters (TinyLlama)
#: 22, one of 1.35e9 (Sheared-LLaMA) 24; assumed for the other two is what their sizes allow at widths of 1,024 and
#: 1,536.
SPIN_SSMS: Mapping[str, DraftModel] = {
    "68M": DraftModel(0.068e9, 2), "265M": DraftModel(0.265e9, 16), "616M": DraftModel(0.616e9, 18),
    "1.1B": DraftModel(1.1e9, 22), "1.4B": DraftModel(1.4e9, 24),
}  # fmt: skip

#: Each on a V100, the kernels from CUDA graphs: assumed 50 microseconds a layer, as for `LLAMA_160M_A100`.
SPIN_SSM_V100: Mapping[str, DraftCost] = {
    name: model.cost(50e-6, V100_BANDWIDTH, V100_ARITHMETIC) for name, model in SPIN_SSMS.items()
}


def draft_cost(cost: Cost) -> DraftCost:
    """What a draft model takes beside a target of this cost model: as its profile or constants say, or the paper's
    smallest draft model on the same machine; nothing where neither is known."""
    match cost:
        case Profiled():
            return DraftCost(cost.draft_level, 0.0)
        case Linear():
            return DraftCost(cost.draft_level, 0.0, cost.draft_token)
    if cost in [machine.cost for machine in LLAMA2_A100.values()]:
        return LLAMA_160M_A100
    if cost in [machine.cost for machine in LLAMA_V100.values()]:
        return SPIN_SSM_V100["68M"]
    return FREE
