"""Prompts that ask for facts of a text as JSON, with the schemas of the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXT: dict[str, Any] = {"type": "string", "maxLength": 60}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 10_000}
_PRICE: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 100_000, "multipleOf": 0.01}
_DATE: dict[str, Any] = {"type": "string", "format": "date"}


@dataclass(frozen=True, slots=True)
class Extraction:
    """A prompt, and the JSON schema of its answer."""

    prompt: str
    schema: Mapping[str, Any]


def _object(**fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _list(items: Mapping[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _asking(what: str, text: str, **fields: Mapping[str, Any]) -> Extraction:
    return Extraction(
        f"Extract {what} as a JSON object with the keys {', '.join(fields)}.\n\n{text}", _object(**fields)
    )


EXTRACTIONS: tuple[Extraction, ...] = (
    _asking(
        "the person", "Marta Oliveira is 34 years old. She teaches chemistry at a school in Porto.",
        name=_TEXT, age=_COUNT, job=_TEXT, city=_TEXT,
    ),
    _asking(
        "the person", "At 71, Henrik Dahl still repairs clocks in his workshop behind the station of Bergen.",
        name=_TEXT, age=_COUNT, job=_TEXT, city=_TEXT,
    ),
    _asking(
        "the order", "Please send two boxes of green tea at 7.50 euros each and one teapot at 24 euros to Ana Ruiz.",
        customer=_TEXT, items=_list(_object(product=_TEXT, quantity=_COUNT, price=_PRICE), 4),
    ),
    _asking(
        "the order", "Tom wants 3 bags of flour (2.10 each), 12 eggs (0.30 each) and 1 jar of honey (6.80).",
        customer=_TEXT, items=_list(_object(product=_TEXT, quantity=_COUNT, price=_PRICE), 4),
    ),
    _asking(
        "the event", "The choir of Saint Anne sings in the old market hall on 12 May 2024. Tickets cost 15 euros.",
        title=_TEXT, place=_TEXT, date=_DATE, price=_PRICE,
    ),
    _asking(
        "the event", "On 3 October 2025 the city library shows films about rivers in its garden. Entry is free.",
        title=_TEXT, place=_TEXT, date=_DATE, price=_PRICE,
    ),
    _asking(
        "the review", "The soup was cold and the waiter forgot our bread, but the cake was the best in years.",
        rating={"type": "integer", "minimum": 1, "maximum": 5}, mood={"enum": ["positive", "mixed", "negative"]},
        good=_list(_TEXT, 3), bad=_list(_TEXT, 3),
    ),
    _asking(
        "the review", "These shoes are light and warm. After a month of rain they are still dry. The laces are short.",
        rating={"type": "integer", "minimum": 1, "maximum": 5}, mood={"enum": ["positive", "mixed", "negative"]},
        good=_list(_TEXT, 3), bad=_list(_TEXT, 3),
    ),
    _asking(
        "the trip", "We fly from Oslo to Rome on 2 June 2025, stay for five nights and return by train through Zurich.",
        origin=_TEXT, destination=_TEXT, departure=_DATE, nights=_COUNT, returns_by={"enum": ["plane", "train", "bus"]},
    ),
    _asking(
        "the fault", "Since the update on 8 March 2024 the printer on floor 2 prints every page twice. It is urgent.",
        device=_TEXT, since=_DATE, problem=_TEXT, urgent={"type": "boolean"},
    ),
    _asking(
        "the recipe", "For the pancakes mix 200 g of flour, 3 eggs and half a litre of milk. They take 25 minutes.",
        dish=_TEXT, minutes=_COUNT, ingredients=_list(_object(name=_TEXT, amount=_TEXT), 5),
    ),
    _asking(
        "the flat", "For rent: three rooms on the fourth floor, 78 square metres, balcony, no lift, 940 euros a month.",
        rooms=_COUNT, floor=_COUNT, square_metres=_COUNT, balcony={"type": "boolean"}, rent=_PRICE,
    ),
)  # fmt: skip
