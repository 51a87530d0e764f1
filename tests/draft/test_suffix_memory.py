"""The memory of answers: what its file gives back, whose it is, and files that do not fit."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tiny
from helpers.generation import GREEDY, tokens_of
from jaxspec.config import ConfigError
from jaxspec.draft.suffix_memory import SuffixMemory, UnfitMemory

TEXTS = st.lists(st.integers(0, 9), min_size=8, max_size=20)


def kept(memory: SuffixMemory, tenant: str) -> list[int]:
    index = memory.of(tenant)
    return [] if index is None else index.tokens().tolist()


@settings(deadline=None, max_examples=50)
@given(
    answers=st.lists(
        st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 9), min_size=8, max_size=20)), max_size=8
    ),
    capacity=st.integers(1, 60),
    shared=st.booleans(),
)
def test_the_file_gives_back_what_was_remembered(
    tmp_path_factory: pytest.TempPathFactory, answers: list[tuple[str, list[int]]], capacity: int, shared: bool
) -> None:
    path = tmp_path_factory.mktemp("memory") / "new" / "answers"
    memory = SuffixMemory(capacity, shared, path, "tiny")
    for tenant, answer in answers:
        memory.learn(tenant, answer)
    memory.flush()
    assert path.exists() == bool(answers)
    again = SuffixMemory(capacity, shared, path, "tiny")
    for tenant in "ab":
        old, new = kept(memory, tenant), kept(again, tenant)
        # Of the oldest text a full memory has only the end, which may be too short to be worth it.
        assert old[len(old) - len(new) :] == new and len(old) - len(new) < 9
        if shared:
            assert kept(again, tenant) == kept(again, "c")


def test_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    memory = SuffixMemory(100, path=tmp_path / "answers")
    memory.learn("a", [1] * 10)
    memory.flush()
    assert (tmp_path / "answers").stat().st_mode & 0o077 == 0 and [p.name for p in tmp_path.iterdir()] == ["answers"]
    os.remove(tmp_path / "answers")
    memory.flush()
    assert not (tmp_path / "answers").exists(), "nothing new"


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    memory = SuffixMemory(100, path=path, model="tiny")
    memory.learn("a", [1] * 10)
    memory.flush()
    with pytest.raises(UnfitMemory, match="answers of tiny, not of other"):
        SuffixMemory(100, path=path, model="other")
    with pytest.raises(UnfitMemory, match="each API key on its own, suffix_shared says otherwise"):
        SuffixMemory(100, True, path, "tiny")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UnfitMemory):
        SuffixMemory(100, path=path, model="tiny")
    with pytest.raises(OSError, match="Is a directory"):
        SuffixMemory(100, path=tmp_path, model="tiny")


def test_a_folder_that_takes_no_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    memory = SuffixMemory(100, path=tmp_path / "file" / "answers")
    memory.learn("a", [1] * 10)
    with caplog.at_level(logging.WARNING):
        memory.flush()
    assert "suffix_path: cannot write" in caplog.text


def test_an_engine_keeps_answers_across_restarts(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(
        draft="suffix", suffix_path=str(tmp_path / "answers"), page_size=16, max_num_seqs=2, token_buckets=[1, 16],
        kv_cache_tokens=512, max_num_batched_tokens=16, max_model_len=64, compilation_cache_dir="",
    )  # fmt: skip
    with tiny.llm(**options) as llm:
        answer = tokens_of(llm.generate([[3, 4, 5]], GREEDY)[0])
    assert SuffixMemory(100, path=tmp_path / "answers", model=tiny.model().name).of("") is not None
    with tiny.llm(**options) as llm:
        assert tokens_of(llm.generate([[3, 4, 5]], GREEDY)[0]) == answer
    with pytest.raises(ConfigError, match=r"suffix_path: cannot use .*remove it, or name another file"):
        tiny.llm(**options, suffix_shared=True)
