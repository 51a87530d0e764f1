"""Stop strings that are complete before `min_tokens`: they end nothing, and break nothing."""

from __future__ import annotations

import pytest

from helpers.fakes import ByteTokenizer, as_tokenizer
from jaxspec.engine.detokenizer import Detokenizer


@pytest.mark.parametrize("stop", [",", "aa", "aba", "b, "])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_early_stop_string_is_text(stop: str, size: int) -> None:
    text, least = "aaab, abab, aabaaba, b, c" * 2, 12
    stream = Detokenizer(as_tokenizer(ByteTokenizer()), [stop], min_tokens=least)
    out, ended = "", None
    for start in range(0, len(text), size):
        pushed = stream.push(list(text[start : start + size].encode()))
        out, ended = out + pushed.text, pushed.stop
        if ended:
            break
    first = next(i for i in range(least + 1, len(text) + 1) if text[:i].endswith(stop))
    assert (ended, out) == (stop, text[: first - len(stop)])
