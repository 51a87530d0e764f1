"""The `slo` field of requests, in the HTTP API and in `LLM`, and its resolution to a `Slo` in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, ValidationError

from jaxspec.errors import InvalidRequest
from jaxspec.sched.config import LatencySlo, SloSettings
from jaxspec.sched.slo import Slo


class RequestSlo(LatencySlo):
    """`{"tpot_ms": …, "ttft_ms": …, "category": …}`, all optional. Types are not converted."""

    model_config = ConfigDict(strict=True)

    category: str | None = None


def read(slo: Any) -> RequestSlo | None:
    """Validate the `slo` argument of `LLM`. Raises `InvalidRequest` naming the field."""
    if slo is None:
        return None
    try:
        return RequestSlo.model_validate(dict(slo) if isinstance(slo, Mapping) else slo)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(("slo", *map(str, first["loc"])))
        raise InvalidRequest(field, f"{field}: {first['msg']}") from None


def resolve(fields: RequestSlo | None, settings: SloSettings) -> Slo:
    """A request's SLO. Fields that it does not set come from its category, or without one from the config.

    Raises `InvalidRequest` for an unknown category.
    """
    if fields is None:
        return settings.slo
    base: LatencySlo = settings
    if fields.category is not None:
        if fields.category not in settings.categories:
            known = ", ".join(sorted(settings.categories)) or "none"
            raise InvalidRequest("slo.category", f"slo.category: {fields.category!r:.64} is unknown; known: {known}")
        base = settings.categories[fields.category]
    return LatencySlo(tpot_ms=fields.tpot_ms or base.tpot_ms, ttft_ms=fields.ttft_ms or base.ttft_ms).slo


def check_possible(slo: Slo, least: Slo, default: Slo) -> None:
    """Raises `InvalidRequest` for an SLO below `least`, which no schedule on this engine can meet.

    The config's `default` SLOs are exempt: the request did not set them.
    """
    for name in ("tpot", "ttft"):
        target_s, least_s = getattr(slo, name), getattr(least, name)
        if target_s is not None and target_s < least_s and target_s != getattr(default, name):
            field = f"slo.{name}_ms"
            lowest = f"{1000 * least_s:.3g}"
            raise InvalidRequest(
                field,
                f"{field}: {1000 * target_s:g} is impossible; by measured step times this engine needs about "
                f"{lowest} ms",
            )
