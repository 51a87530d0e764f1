"""Bounds of a grammar's size and of the work for one token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits


def limits() -> LLParserLimits:
    """llguidance's limits. Of lexer states there are a fifth of its default, at about 2 kB each. More
    items in a row than by default are for objects with a thousand optional keys."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000, max_items_in_row=5_000,
        max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False,
    )  # fmt: skip
