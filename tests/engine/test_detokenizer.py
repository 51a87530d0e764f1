"""Text out of tokens: exact, never a cut character, never a piece of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE

from helpers.fakes import ByteTokenizer, as_tokenizer
from jaxspec.engine.detokenizer import Detokenizer
from jaxspec.models.load.tokenizer import Tokenizer

ALPHABET = "aab é漢🦉 "
MORE = [piece.encode() for piece in ("ab", "ba", " a", "é漢", "🦉b", "aba")] + [
    b"a\xc3",
    b"\xa9b",
    b"\xe6\xbc",
    b"\xa2a",
]
BYTES = ByteTokenizer(MORE)
TOKENIZER = as_tokenizer(BYTES)
texts = st.text(ALPHABET, max_size=40)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


@st.composite
def tokenized(draw: st.DrawFn) -> list[int]:
    """A text cut into tokens at random, inside of characters too, with special tokens between them."""
    raw, ids = draw(texts).encode(), []
    while raw:
        fitting = [i for i in range(BYTES.end_id) if raw.startswith(TOKENIZER.token_bytes(i))]
        ids.append(draw(st.sampled_from(fitting)))
        raw = raw[len(TOKENIZER.token_bytes(ids[-1])) :]
        if draw(st.integers(0, 9)) == 0:
            ids.append(BYTES.end_id)
    return ids


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first completed stop string ends, and which it is: by brute force."""
    for end in range(len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            return end, max(complete, key=len)
    return None


@given(tokenized(), st.booleans(), st.data())
def test_deltas_join_to_what_decode_gives(ids: list[int], skip: bool, data: st.DataObject) -> None:
    stream = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    deltas = []
    rest = ids
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        text, stop, consumed = stream.push(rest[:n])
        assert (stop, consumed) == (None, n)
        deltas.append(text)
        rest = rest[n:]
    assert all("\ufffd" not in d for d in deltas if skip)
    assert "".join(deltas) + stream.finish() == TOKENIZER.decode(ids, skip)


@given(tokenized(), stops, st.booleans())
def test_stop_strings(ids: list[int], stop: list[str], include: bool) -> None:
    whole = TOKENIZER.decode(ids)
    found = first_stop(whole, stop)
    stream = Detokenizer(TOKENIZER, stop, include)
    shown, consumed, hit = "", 0, None
    for id in ids:
        text, hit, n = stream.push([id])
        shown, consumed = shown + text, consumed + n
        if hit is None:  # nothing shown may turn out to belong to a stop string
            assert whole.startswith(shown)
            assert found is None or len(shown) <= found[0] - len(found[1])
        else:
            break
    shown += stream.finish()
    if found is None:
        assert (hit, shown, consumed) == (None, whole, len(ids))
        return
    end, string = found
    assert hit == string
    assert shown == whole[: end if include else end - len(string)]
    # The last token that counts is the one that completes the string.
    assert len(TOKENIZER.decode(ids[:consumed]).rstrip("\ufffd")) >= end
    assert first_stop(TOKENIZER.decode(ids[: consumed - 1]).rstrip("\ufffd"), stop) is None
    assert stream.push(ids) == ("", string, 0)


@given(tokenized(), stops)
def test_one_push_equals_many(ids: list[int], stop: list[str]) -> None:
    at_once, singly = Detokenizer(TOKENIZER, stop), Detokenizer(TOKENIZER, stop)
    whole = at_once.push(ids)
    parts = [singly.push([i]) for i in ids]
    assert whole.text == "".join(p.text for p in parts)
    assert whole.consumed == sum(p.consumed for p in parts)
    assert at_once.finish() == singly.finish()


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_bytes_that_are_no_text(ids: list[int]) -> None:
    stream = Detokenizer(TOKENIZER)
    assert stream.push(ids).text + stream.finish() == TOKENIZER.decode(ids)


def test_nothing_is_held_back_longer_than_needed() -> None:
    stream = Detokenizer(TOKENIZER, ["END"])
    assert [stream.push([ord(c)]).text for c in "aENb"] == ["a", "", "", "ENb"]
    assert stream.push(b"E").text == ""
    assert stream.finish() == "E"


def test_overlapping_beginnings_of_a_stop_string() -> None:
    stream = Detokenizer(TOKENIZER, ["aab"])
    assert stream.push(b"aaab") == ("a", "aab", 4)


def test_a_leading_space_goes_where_decode_drops_it() -> None:
    dropping = ByteTokenizer([b" a"], leading_space_drops=True)
    ids = [dropping.end_id, 256, 256]  # the special token is left out, so the space is still at the start
    stream = Detokenizer(as_tokenizer(dropping))
    assert stream.push(ids).text == dropping.decode(ids) == "a a"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(TOKENIZER, [""])


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    """The shape of a Llama 2 vocabulary: pieces with ▁ for the space, and bytes to fall back on."""
    pieces = ["▁", "▁Die", "▁Eule", "E", "u", "l", "e", "▁▁"]
    vocab = {piece: i for i, piece in enumerate([*(f"<0x{b:02X}>" for b in range(256)), *pieces])}
    backend = Backend(BPE(vocab, [], byte_fallback=True, fuse_unk=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


@given(st.data())
def test_a_real_metaspace_decoder(metaspace: Tokenizer, data: st.DataObject) -> None:
    piece = st.integers(256, metaspace.vocab_size - 1).map(lambda i: [i])
    char = st.sampled_from("é漢🦉x ").map(lambda c: list(c.encode()))
    ids = [i for part in data.draw(st.lists(piece | char, max_size=12)) for i in part]
    stream = Detokenizer(metaspace)
    assert "".join(stream.push([i]).text for i in ids) + stream.finish() == metaspace.decode(ids)


def test_only_one_leading_space_is_dropped(metaspace: Tokenizer) -> None:
    ids = metaspace.backend.get_vocab()
    stream = Detokenizer(metaspace)
    assert stream.push([ids["▁▁"], ids["E"]]).text == metaspace.decode([ids["▁▁"], ids["E"]]) == " E"
