"""generation_config.json: the sampling parameters of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import config, hf_tensors, write_hf
from jaxspec.errors import ModelLoadError
from jaxspec.models.load import load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    c = config()
    return write_hf(tmp_path, c, [hf_tensors(c)])


@pytest.mark.parametrize(
    ("written", "sampling"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01},
        ),
        ({"repetition_penalty": 1.1, "max_new_tokens": 2048}, {"repetition_penalty": 1.1, "max_tokens": 2048}),
        ({"do_sample": False, "temperature": 0.6, "num_beams": 4}, {"temperature": 0.6}),  # as in vLLM
        ({"temperature": None, "top_k": 0}, {"top_k": 0}),
        ({"eos_token_id": [1, 2], "max_length": 4096}, {}),
    ],
)
def test_what_requests_may_use(
    folder: Path, written: dict[str, Any], sampling: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(written))
    assert load_model(str(folder)).sampling == sampling
    assert capfd.readouterr() == ("", "")


def test_without_the_file(folder: Path) -> None:
    assert load_model(str(folder)).sampling == {}


@pytest.mark.parametrize("written", ["{", "[]", '{"cache_implementation": "bogus"}'])
def test_a_damaged_file_is_named(folder: Path, written: str) -> None:
    (folder / "generation_config.json").write_text(written)
    with pytest.raises(ModelLoadError, match=r"generation_config.json: not a valid generation config"):
        load_model(str(folder))
