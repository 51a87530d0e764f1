"""The way between device and host on a virtual clock: transfers take their time beside the steps."""

from __future__ import annotations

from jaxspec.sched.plan import Plan, Transfer
from jaxspec.sched.timing import SwapCosts


class Link:
    """One transfer at a time each way, in the order in which they were planned; both ways at once, and beside steps.

    A step waits for what it needs: that uploads to its pages have arrived, and that offloads from them have left. It
    waits for no others.
    """

    def __init__(self, costs: SwapCosts) -> None:
        self._costs = costs
        self._out = self._in = 0.0  # when each way is free
        # When the last transfer of a page ends. Of pages for which that is past nothing is kept.
        self._device: dict[int, float] = {}
        self._host: dict[int, float] = {}
        #: Pages moved, both ways together.
        self.moved = 0

    def start(self, plan: Plan, now: float) -> None:
        """Begin a plan's transfers."""
        if now >= max(self._out, self._in):
            self._device.clear()
            self._host.clear()
        for transfer in plan.offload:
            self._out = self._move(transfer, max(now, self._out), self._costs.offload_page)
        for transfer in plan.upload:
            self._in = self._move(transfer, max(now, self._in), self._costs.upload_page)

    def _move(self, transfer: Transfer, begin: float, page: float) -> float:
        """-> when it ends."""
        end = max(begin, _last(self._device, transfer.device), _last(self._host, transfer.host))
        for device, host in zip(transfer.device, transfer.host, strict=True):
            end += page
            self._device[device] = self._host[host] = end
        self.moved += len(transfer.device)
        return end

    def ready(self, plan: Plan, now: float) -> float:
        """When the plan's step may begin."""
        if not self._device or now >= max(self._out, self._in):
            return now
        return max(now, *(_last(self._device, scheduled.request.pages) for scheduled in plan.scheduled))


def _last(ends: dict[int, float], pages: tuple[int, ...] | list[int]) -> float:
    return max((ends[page] for page in pages if page in ends), default=0.0) if ends else 0.0
