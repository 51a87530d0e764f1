"""Training data that the tests of distillation share."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.distillation import LONGEST, TARGET, answers
from helpers.jsonl import write_lines
from jaxspec.draft.distill.data import Corpus, corpus


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distill")


@pytest.fixture(scope="module")
def text(work: Path) -> Corpus:
    return corpus([str(write_lines(work / "answers.jsonl", answers(40)))], TARGET, LONGEST, work)
