"""The link between device and host memory on a virtual clock: transfers overlap with steps."""

from __future__ import annotations

from jaxspec.sched.plan import Plan, Transfer
from jaxspec.sched.timing import SwapCosts


class Link:
    """One transfer at a time in each direction, in plan order. The directions are independent and overlap with steps.

    A step waits only for transfers of its own pages: uploads to them and offloads from them.
    """

    def __init__(self, costs: SwapCosts) -> None:
        self._costs = costs
        self._out = self._in = 0.0  # when each direction is free
        # When the last transfer of each page ends. Cleared while the link is idle.
        self._device: dict[int, float] = {}
        self._host: dict[int, float] = {}
        #: Pages moved in both directions together.
        self.moved = 0

    def start(self, plan: Plan, now: float) -> None:
        """Start a plan's transfers at time `now`."""
        if now >= max(self._out, self._in):
            self._device.clear()
            self._host.clear()
        for transfer in plan.offload:
            self._out = self._move(transfer, max(now, self._out), self._costs.offload_page)
        for transfer in plan.upload:
            self._in = self._move(transfer, max(now, self._in), self._costs.upload_page)

    def _move(self, transfer: Transfer, begin: float, page: float) -> float:
        """Returns when the transfer ends; `page`: seconds per page."""
        end = max(begin, _last(self._device, transfer.device), _last(self._host, transfer.host))
        for device, host in zip(transfer.device, transfer.host, strict=True):
            end += page
            self._device[device] = self._host[host] = end
        self.moved += len(transfer.device)
        return end

    def ready(self, plan: Plan, now: float) -> float:
        """Earliest time at which the plan's step can begin."""
        if not self._device or now >= max(self._out, self._in):
            return now
        return max(now, *(_last(self._device, scheduled.request.pages) for scheduled in plan.scheduled))


def _last(ends: dict[int, float], pages: tuple[int, ...] | list[int]) -> float:
    """When the last transfer of these pages ends; 0 if there is none."""
    return max((ends[page] for page in pages if page in ends), default=0.0) if ends else 0.0
