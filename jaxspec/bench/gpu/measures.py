"""The function that measures each kind of cell. It takes the card and the cell's arguments and returns numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxspec.bench.gpu import agreement, numerics, rates, serving, steps

MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "rate": rates.rate,
    "kernel": numerics.error,
    "step": steps.step,
    "agreement": agreement.compare,
    "attention": numerics.time_alone,
    "prefill": steps.prefill,
    "engine": serving.generate,
}
