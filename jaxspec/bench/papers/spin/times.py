"""The times of SPIN's models: fitted to those that the paper measures, and from the data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxspec.bench.papers.spin.difficulty import FITTED, SSMS, Model
from jaxspec.sched.sim.cost import LLAMA_V100, Cost, Linear
from jaxspec.sched.sim.draft_cost import SPIN_SSM_V100, SPIN_SSMS, DraftCost

LLM = "llama-7b"
#: §VI-B3: seconds to verify a batch of 16 on Alpaca with LLaMA-7B, padded and packed. (The text says 33.61 % less; it
#: is 36.61 %.)
VERIFIED_PADDED, VERIFIED_PACKED = 0.52921, 0.33546
#: Tokens and KV positions of these batches in the simulator, with chains of 4 from 68M and Alpaca's lengths (Fig. 12).
PADDED_LOAD, PACKED_LOAD = (80.0, 2622.0), (80.0, 1127.0)
#: Mean padded KV positions per Alpaca request in a batch of 8, in the simulator.
_USUAL = 185

#: Parameters of each target model per device, relative to LLaMA-7B.
_PARTS: Mapping[str, float] = {LLM: 1.0, "llama-13b": 13.02 / 6.74 / 2, "llama-30b": 32.53 / 6.74 / 4}
#: Seconds of LLaMA-7B per step, per KV position and per token. The step is the roofline's time to read the weights. The
#: others are such that the two batches above take the published times.
STEP = LLAMA_V100[LLM].cost.weights
_POSITION = (PACKED_LOAD[0] * (VERIFIED_PADDED - STEP) - PADDED_LOAD[0] * (VERIFIED_PACKED - STEP)) / (
    PACKED_LOAD[0] * PADDED_LOAD[1] - PADDED_LOAD[0] * PACKED_LOAD[1]
)
_TOKEN = (VERIFIED_PADDED - STEP - PADDED_LOAD[1] * _POSITION) / PADDED_LOAD[0]


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost models of the target models and of the draft models, by name."""

    targets: Mapping[str, Cost]
    drafts: Mapping[str, DraftCost]

    def drafting(self, factor: float) -> Costs:
        """A copy whose draft models take `factor` times as long."""
        slower = {
            name: DraftCost(*(factor * x for x in (own.floor, own.token, own.request)))
            for name, own in self.drafts.items()
        }
        return replace(self, drafts=slower)


def drafts(model: Model) -> dict[str, DraftCost]:
    """Draft costs: LLaMA-7B's in proportion to the parameters, times the model's factors. They read padded KV."""
    factors = {name: model.drafting * (model.largest if name == SSMS[-1] else 1.0) for name in SSMS}
    return {
        name: DraftCost(*(factors[name] * ssm.parameters / 6.74e9 * x for x in (STEP, _TOKEN, _REQUEST)))
        for name, ssm in SPIN_SSMS.items()
    }


_REQUEST = _TOKEN + _USUAL * _POSITION
ROOFLINE = Costs({name: machine.cost for name, machine in LLAMA_V100.items()}, SPIN_SSM_V100)
#: The paper gives no times of the draft models and the larger targets. Assuming the same software, the targets' are
#: LLaMA-7B's in proportion to the parameters per device; the draft models' are fitted.
AS_MEASURED = Costs(
    {name: Linear(step=STEP * part, token=_TOKEN * part, position=_POSITION * part) for name, part in _PARTS.items()},
    drafts(FITTED),
)
MEASURED, FROM_SHEETS, SLOW_DRAFTS, FAST_DRAFTS = "as measured", "roofline", "drafting × 2", "drafting × 0.5"
CALIBRATIONS: Mapping[str, Costs] = {
    MEASURED: AS_MEASURED, FROM_SHEETS: ROOFLINE,
    SLOW_DRAFTS: AS_MEASURED.drafting(2.0), FAST_DRAFTS: AS_MEASURED.drafting(0.5),
}  # fmt: skip
