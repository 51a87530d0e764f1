"""Reads a server's Prometheus metrics (/metrics) during a run."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

#: The first of which a server has any: jaxspec's servers have the same metrics under both.
PREFIXES = ("jaxspec:", "vllm:")
#: Labels that are dropped because they are constant during a run.
IDLE_LABELS = {"model_name", "engine"}


class Scraper:
    """Collects the increase of counters, last and maximum values of gauges, and means of histograms between `begin` and
    `end`.

    Only metrics with a prefix of `PREFIXES` are read. For a server without /metrics the results are empty. `every`:
    seconds between readings.
    """

    def __init__(self, http: httpx.AsyncClient, url: str, every: float = 1.0):
        self._http, self._url, self._every = http, url + "/metrics", every
        self._first: dict[str, float] | None = None
        self._last: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._kinds: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Take the first reading, and if it has metrics, start reading periodically."""
        self._first = await self._read()
        if self._first:
            self._task = asyncio.create_task(self._poll())

    async def end(self) -> dict[str, dict[str, Any]]:
        """Results: {"counters": name -> increase, "gauges": name -> {last, max}, "means": histogram -> mean} or {}."""
        if self._task is None or self._first is None:
            return {}
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._read()
        growth = {n: v - self._first.get(n, 0.0) for n, v in self._last.items() if self._kinds[n] != "gauge"}
        means = {}
        for name in [n for n in growth if self._kinds[n] == "count"]:
            base, _, labels = name.partition("_count")
            total, count = growth.pop(f"{base}_sum{labels}", 0.0), growth.pop(name)
            if count:
                means[base + labels] = total / count
        gauges = {n: {"last": self._last[n], "max": p} for n, p in self._peaks.items()}
        return {"counters": growth, "gauges": gauges, "means": means}

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            await self._read()

    async def _read(self) -> dict[str, float]:
        """Read the metrics once. If that fails, the previous reading is kept and returned."""
        try:
            response = await self._http.get(self._url)
            families = list(text_string_to_metric_families(response.text)) if response.status_code == 200 else []
        except (httpx.HTTPError, ValueError):
            return self._last
        values: dict[str, float] = {}
        prefix = next((p for p in PREFIXES if any(family.name.startswith(p) for family in families)), PREFIXES)
        for family in families:
            if not family.name.startswith(prefix):
                continue
            for sample in family.samples:
                if (kind := _kind(family.type, sample.name)) is None:
                    continue
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k not in IDLE_LABELS)
                name = sample.name + (f"{{{labels}}}" if labels else "")
                values[name] = values.get(name, 0.0) + sample.value
                self._kinds[name] = kind
        for name, value in values.items():
            if self._kinds[name] == "gauge":
                self._peaks[name] = max(value, self._peaks.get(name, value))
        self._last = values or self._last
        return self._last


def _kind(family: str, name: str) -> str | None:
    """gauge, counter, sum or count; None for samples that are not read, such as creation times and buckets."""
    if family == "gauge":
        return None if name.endswith("_created") else "gauge"
    if family == "counter":
        return "counter" if name.endswith("_total") else None
    if family in ("histogram", "summary"):
        return next((kind for kind in ("sum", "count") if name.endswith("_" + kind)), None)
    return None
