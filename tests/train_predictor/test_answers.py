"""Files of answers: lines that may be incomplete, and the model that they name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers import tiny
from jaxspec.models.load import LoadedModel
from jaxspec.train_predictor.answers import OtherModel, check, mend, origin_of, read_lines


def test_a_line_that_was_cut_off_is_left_out_and_can_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = '{"a": 1}\n\n{"a": "Bücher"}\n'.encode()
    path.write_bytes(whole + '{"a": "Bü'.encode()[:-1])
    assert list(read_lines(path)) == [{"a": 1}, {"a": "Bücher"}]
    mend(path)
    assert path.read_bytes() == whole
    path.write_bytes(whole + b'{"a": 3}')
    assert len(list(read_lines(path))) == 3, "only the line's end is missing, as editors leave it"
    path.write_bytes(whole + b'{"a"\n')
    with pytest.raises(ValueError, match="line 4"):
        list(read_lines(path))


def other(name: str) -> LoadedModel:
    """A model of the same sizes and other weights."""
    model = tiny.model()
    return replace(model, name=name, weights={**model.weights, "norm": model.weights["norm"] + 1})


def test_the_digest_says_whose_answers_these_are(caplog: pytest.LogCaptureFixture) -> None:
    own = origin_of(tiny.model())
    check([own.fields, {"model": "tiny"}, {**own.fields, "model": "as/a/folder"}], own, "f")
    assert not caplog.records
    for row, said in (
        ({"model": "rand"}, "answers of rand, not of tiny"),
        (origin_of(other("rand")).fields, "answers of rand, not of tiny"),
        (origin_of(other("tiny")).fields, "another model that is also called tiny"),
    ):
        with pytest.raises(OtherModel, match=f"f holds .*{said}"):
            check([own.fields, row], own, "f")
    check([{"id": 1}, {"id": 2}], own, "f")
    assert [r.getMessage() for r in caplog.records] == [
        "f: 2 answers name no model, because an earlier version wrote them; assuming tiny"
    ]
