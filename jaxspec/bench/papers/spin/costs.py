"""What SPIN's models take: as a roofline of the machine, and as the paper's own latencies would have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxspec.sched.sim.cost import LLAMA_V100, Cost, Linear
from jaxspec.sched.sim.draft_cost import SPIN_SSM_V100, SPIN_SSMS, DraftCost

#: §VI-B3: seconds of verifying a batch of 16 on Alpaca with LLaMA-7B, padded and packed. (The text calls that 33.61 %
#: less; it is 36.61 %.)
VERIFIED_PADDED, VERIFIED_PACKED = 0.52921, 0.33546
#: §VI-B1: accepted tokens a second on Alpaca, LLaMA-7B: 68M for all; SPIN's choice of draft models alone.
VANILLA_68M, CHOICE_ALONE = 32.21, 62.33

#: Parameters of a device's part of each target, by LLaMA-7B's.
_PARTS: Mapping[str, float] = {"llama-7b": 1.0, "llama-13b": 13.02 / 6.74 / 2, "llama-30b": 32.53 / 6.74 / 4}
#: Seconds of a step of LLaMA-7B, of a token in it and of a position of KV. The step is the roofline's, reading the
#: weights. The others are fitted to the two latencies above: a batch of 16 with chains of 4 verifies 80 tokens, and
#: with Alpaca's lengths reads 3,626 positions of KV padded and 1,322 packed, in the simulator.
_STEP = LLAMA_V100["llama-7b"].cost.weights
_POSITION = (VERIFIED_PADDED - VERIFIED_PACKED) / (3626 - 1322)
_TOKEN = (VERIFIED_PACKED - _STEP - 1322 * _POSITION) / 80
#: Positions of KV, padded, that a request of Alpaca has in the mean of a batch of 8, in the simulator.
_USUAL = 189


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the targets' steps and of the draft models' runs, by name."""

    targets: Mapping[str, Cost]
    drafts: Mapping[str, DraftCost]


def _draft(share: float) -> DraftCost:
    return DraftCost(_STEP * share, _TOKEN * share, (_TOKEN + _USUAL * _POSITION) * share)


ROOFLINE = Costs({name: machine.cost for name, machine in LLAMA_V100.items()}, SPIN_SSM_V100)
#: Of the draft models' times and the larger targets' the text says nothing: taken to run in the same software, they
#: take what LLaMA-7B takes in proportion to the parameters that a device holds.
AS_MEASURED = Costs(
    {name: Linear(step=_STEP * part, token=_TOKEN * part, position=_POSITION * part) for name, part in _PARTS.items()},
    {name: _draft(model.parameters / 6.74e9) for name, model in SPIN_SSMS.items()},
)
CALIBRATIONS: Mapping[str, Costs] = {"as measured": AS_MEASURED, "roofline": ROOFLINE}
