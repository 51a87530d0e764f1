"""Latency targets as requests name them, over HTTP and in `LLM`, and what they come to on an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, ValidationError

from jaxspec.sampling_params import InvalidRequest
from jaxspec.sched.config import LatencySlo, SloSettings
from jaxspec.sched.slo import Slo


class RequestSlo(LatencySlo):
    """`{"tpot_ms": …, "ttft_ms": …, "category": …}`, each of which may be left out. Types are strict."""

    model_config = ConfigDict(strict=True)

    category: str | None = None


def read(slo: Any) -> RequestSlo | None:
    """A mapping as a caller of `LLM` writes it; None: nothing is named. Raises `InvalidRequest` naming the field."""
    if slo is None:
        return None
    try:
        return RequestSlo.model_validate(dict(slo) if isinstance(slo, Mapping) else slo)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(("slo", *map(str, first["loc"])))
        raise InvalidRequest(field, f"{field}: {first['msg']}") from None


def resolve(named: RequestSlo | None, settings: SloSettings) -> Slo:
    """The targets of a request. What it does not name is its category's; the configuration's if it has no category.

    Raises `InvalidRequest` for a category that there is not.
    """
    if named is None:
        return settings.slo
    base: LatencySlo = settings
    if named.category is not None:
        if named.category not in settings.categories:
            known = ", ".join(sorted(settings.categories)) or "none at all"
            raise InvalidRequest("slo.category", f"slo.category: {named.category!r:.64} is unknown; there are: {known}")
        base = settings.categories[named.category]
    return LatencySlo(tpot_ms=named.tpot_ms or base.tpot_ms, ttft_ms=named.ttft_ms or base.ttft_ms).slo


def check_possible(slo: Slo, least: Slo, default: Slo) -> None:
    """Raises `InvalidRequest` for a target below `least`, which nothing on this engine can meet.

    The configuration's `default` ones are not the request's doing, so they are just missed.
    """
    for name in ("tpot", "ttft"):
        wanted, possible = getattr(slo, name), getattr(least, name)
        if wanted is not None and wanted < possible and wanted != getattr(default, name):
            message = (
                f"is impossible: the least on this engine is about {round(1000 * possible, 4):g}, by its measured steps"
            )
            raise InvalidRequest(f"slo.{name}_ms", f"slo.{name}_ms: {1000 * wanted:g} {message}")
