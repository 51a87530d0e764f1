"""Training data of drafters: which rows are kept, which are held out, and the target's features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest

from helpers.distillation import LONGEST, TARGET, answers, final_and_features
from helpers.jsonl import write_lines
from jaxspec.config import ConfigError
from jaxspec.draft.distill import data
from jaxspec.draft.distill.data import Corpus, corpus, read_rows
from jaxspec.models.drafter import feature_width


def test_rows_fit_and_long_prompts_are_left_out(tmp_path: Path) -> None:
    long, one = list(range(32)), {"prompt_ids": [1, 2], "output_ids": list(range(100))}
    rows = [
        one,
        {"prompt_ids": long, "output_ids": [5, 6]},
        {"prompt_ids": [3], "output_ids": [7]},
        one | {"output_ids": [8, 9]},
    ]
    found = read_rows([str(write_lines(tmp_path / "a.jsonl", rows))], 40)
    assert [(row.prompt, row.answer) for row in found] == [([1, 2], list(range(38))), ([1, 2], [8, 9])]
    assert found[0].key == found[1].key


def test_a_conversation_falls_on_one_side(tmp_path: Path) -> None:
    """The side of its first prompt, which an earlier version's file may hold too, without a group."""
    first, second = {"prompt_ids": [1, 2], "output_ids": [3, 4]}, {"prompt_ids": [1, 2, 3, 4, 5], "output_ids": [6, 7]}
    turns = [second | {"turn": 1, "group": "a"}, first | {"turn": 0, "group": "a"}]
    rows = read_rows([str(write_lines(tmp_path / name, part)) for name, part in (("a", turns), ("b", [first]))], 40)
    assert [row.prompt for row in rows] == [[1, 2, 3, 4, 5], [1, 2], [1, 2]]
    assert len({row.key for row in rows}) == 1
    cut = [second | {"turn": 1, "group": "a"}, first | {"turn": 2, "group": "a"}, second | {"turn": 1, "group": "b"}]
    one, same, other = (row.key for row in read_rows([str(write_lines(tmp_path / "c", cut))], 40))
    assert one == same != other


def test_answers_to_a_prompt_fall_on_one_side(text: Corpus) -> None:
    sides: dict[bytes, set[bool]] = {}
    for tokens, start, held in zip(text.tokens, text.start, text.held_out, strict=True):
        sides.setdefault(tokens[:start].tobytes(), set()).add(bool(held))
    assert len(sides) == 40
    assert all(len(side) == 1 for side in sides.values())
    assert 0 < text.held_out.sum() < len(text) / 2


def test_features_are_the_targets_and_are_kept(work: Path, text: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    chex.assert_shape(text.features, (80, LONGEST, feature_width(TARGET.config)))
    chex.assert_type(text.features, np.float16)
    for i in (0, int(text.length.argmax()), int(text.length.argmin())):
        n = text.length[i]
        _, features = final_and_features(text.tokens[i, :n])
        np.testing.assert_allclose(text.features[i, :n], features, rtol=2e-3, atol=5e-3)
        assert not text.features[i, n:].any()

    def never(*_: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(data, "each_features", never)
    again = corpus([str(work / "answers.jsonl")], TARGET, LONGEST, work)
    np.testing.assert_array_equal(again.features, text.features)
    other = [row | {"output_ids": row["output_ids"][::-1]} for row in answers(40)]
    changed = write_lines(work / "changed.jsonl", other)
    with pytest.raises(AssertionError, match="again"):
        corpus([str(changed)], TARGET, LONGEST, work)  # as many tokens, but others


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "No such file"),
        ("", "no answers"),
        ('{"prompt_ids": [1]}\n', "output_ids"),
        ("nonsense\n", "line 1"),
        ('{"prompt_ids": [1, 2], "output_ids": [3, 999]}\n', "vocabulary"),
        ('{"prompt_ids": [1, 2], "output_ids": [3, 4]}\n', "too few"),
        (
            '{"prompt_ids": [1, 2], "output_ids": [3, 4], "model": "rand"}\n',
            "answers of rand, not of tiny: set",
        ),
    ],
)
def test_data_of_no_use_are_named(content: str | None, word: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"^data: .*{word}"):
        corpus([str(path)], TARGET, LONGEST, tmp_path)


def test_one_item_is_made_ahead() -> None:
    made: list[int] = []

    def make() -> Iterator[int]:
        for i in range(3):
            made.append(i)
            yield i

    items = data.one_ahead(make())
    assert [(item, len(made)) for item in items] == [(0, 2), (1, 3), (2, 3)]
    assert not list(data.one_ahead([]))
