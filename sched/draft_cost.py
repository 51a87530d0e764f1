"""How long a draft model takes at the scale of a paper's machine."""

from __future__ import annotations

from dataclasses import dataclass

from jaxspec.sched.cost import A100_ARITHMETIC, A100_BANDWIDTH


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of a round of drafting: its model runs once a level, and no run takes less than `floor`."""

    floor: float
    token: float

    def seconds(self, requests: int, catch_up: int, levels: int, width: int) -> float:
        """The first run sees what the model has not seen yet, `catch_up` tokens; each later one the beams."""
        if not levels:
            return 0.0
        beam = max(self.floor, self.token * requests * width)
        return max(self.floor, self.token * catch_up) + (levels - 1) * beam


#: AdaServe §6.1: Llama-160M-Chat, 12 layers of width 768, 1.62e8 parameters, FP16, on one A100. Its weights are read in
#: 0.3 ms, but each of its some 150 kernels takes a few microseconds however little it computes: assumed 0.6 ms a run
#: from a CUDA graph (§5.2). Reading its KV, 36 KiB a position, is left out.
LLAMA_160M_A100 = DraftCost(max(0.6e-3, 2 * 1.62e8 / A100_BANDWIDTH), 2 * 1.62e8 / A100_ARITHMETIC)
