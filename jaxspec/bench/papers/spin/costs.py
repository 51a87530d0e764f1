"""Step and draft times of SPIN's models: from a roofline of the machine, and fitted to the paper's latencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxspec.sched.sim.cost import LLAMA_V100, Cost, Linear
from jaxspec.sched.sim.draft_cost import SPIN_SSM_V100, SPIN_SSMS, DraftCost

#: §VI-B3: seconds to verify a batch of 16 on Alpaca with LLaMA-7B, padded and packed. (The text says 33.61 % less; it
#: is 36.61 %.)
VERIFIED_PADDED, VERIFIED_PACKED = 0.52921, 0.33546
#: §VI-B1: accepted tokens per second on Alpaca, LLaMA-7B: 68M for all requests; SPIN's draft choice alone.
VANILLA_68M, CHOICE_ALONE = 32.21, 62.33

#: Parameters of each target model per device, relative to LLaMA-7B.
_PARTS: Mapping[str, float] = {"llama-7b": 1.0, "llama-13b": 13.02 / 6.74 / 2, "llama-30b": 32.53 / 6.74 / 4}
#: Seconds of LLaMA-7B per step, per KV position and per token. The step is the roofline's time to read the weights. The
#: others are fitted to the two latencies above: in the simulator a batch of 16 with chains of 4 verifies 80 tokens, and
#: with Alpaca's lengths reads 3,626 KV positions padded and 1,322 packed.
_STEP = LLAMA_V100["llama-7b"].cost.weights
_POSITION = (VERIFIED_PADDED - VERIFIED_PACKED) / (3626 - 1322)
_TOKEN = (VERIFIED_PACKED - _STEP - 1322 * _POSITION) / 80
#: Mean padded KV positions per Alpaca request in a batch of 8, in the simulator.
_USUAL = 189


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost models of the target models and of the draft models, by name."""

    targets: Mapping[str, Cost]
    drafts: Mapping[str, DraftCost]


def _draft(share: float) -> DraftCost:
    return DraftCost(_STEP * share, _TOKEN * share, (_TOKEN + _USUAL * _POSITION) * share)


ROOFLINE = Costs({name: machine.cost for name, machine in LLAMA_V100.items()}, SPIN_SSM_V100)
#: The paper gives no times of the draft models and the larger targets. Assuming the same software, they are LLaMA-7B's
#: in proportion to the parameters per device.
AS_MEASURED = Costs(
    {name: Linear(step=_STEP * part, token=_TOKEN * part, position=_POSITION * part) for name, part in _PARTS.items()},
    {name: _draft(model.parameters / 6.74e9) for name, model in SPIN_SSMS.items()},
)
CALIBRATIONS: Mapping[str, Costs] = {"as measured": AS_MEASURED, "roofline": ROOFLINE}
