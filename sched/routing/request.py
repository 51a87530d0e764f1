"""A request as the router sees it, before any replica has it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxspec.sched.slo import NONE, Slo


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """`prompt_len` and `max_tokens` in tokens. Raises `ValueError` naming a length that is not positive."""

    id: str
    prompt_len: int
    max_tokens: int
    #: Prefix keys of the prompt's leading pages, in order (`prefix_keys`). Empty: unknown, as without a tokenizer.
    page_keys: tuple[int, ...] = ()
    #: Predicted output tokens; None: not known.
    expected_tokens: float | None = None
    slo: Slo = NONE
    tenant: str = ""

    def __post_init__(self) -> None:
        if self.prompt_len < 1 or self.max_tokens < 1:
            raise ValueError(f"request {self.id!r}: prompt_len and max_tokens must be at least 1")
        if self.expected_tokens is not None and not self.expected_tokens > 0:
            raise ValueError(f"request {self.id!r}: expected_tokens must be positive, got {self.expected_tokens}")
