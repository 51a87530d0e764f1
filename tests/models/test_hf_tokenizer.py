"""Tokenizers of folders, through transformers: tokenizer.json as it is, older files converted, no code is run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import GOLDEN, config, hf_tensors, write_hf
from jaxspec.errors import ModelLoadError
from jaxspec.models.load import Tokenizer, load_model
from jaxspec.models.load.hf_tokenizer import load_tokenizer

LLAMA = GOLDEN / "llama"
WHOLE = load_tokenizer(LLAMA)


FAMILIES = ["linear_rope", "llama", "llama3_rope", "mistral", "qwen2", "qwen3"]
TEXTS = [
    "Rainy weekend <|end|> 12,50 €",
    "  two\n\n\tlines",
    "I'll pay   1234€, DON'T ask",
    "e\u0301 ﬁ <|endoftext|>",
    "",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer_json_is_taken_as_it_is(family: str) -> None:
    """Whatever class transformers has for the family."""
    file = tokenizers.Tokenizer.from_file(str(GOLDEN / family / "tokenizer.json"))
    tokenizer = load_tokenizer(GOLDEN / family)
    for text in TEXTS:
        for special in (True, False):
            assert tokenizer.encode(text, special) == file.encode(text, add_special_tokens=special).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (0, (1,), {0, 1})
    assert tokenizer.vocab_size == 320
    assert tokenizer.template_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert tokenizer.chat_template == (GOLDEN / family / "chat_template.jinja").read_text(encoding="utf-8")


def write_bpe(folder: Path, **settings: Any) -> Path:
    """The recorded models' tokenizer as GPT-2 stores one: vocab.json and merges.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads((LLAMA / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (folder / "chat_template.jinja").write_text((LLAMA / "chat_template.jinja").read_text())
    named = {"bos_token": "<|start|>", "eos_token": "<|end|>", "tokenizer_class": "GPT2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))
    return folder


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_bpe(tmp_path_factory.mktemp("bpe")))


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bpe_files_encode_as_tokenizer_json_does(bpe: Tokenizer, text: str) -> None:
    assert bpe.encode(text) == WHOLE.encode(text)


def test_bpe_files_keep_the_special_tokens_and_the_template(bpe: Tokenizer) -> None:
    assert bpe.encode("a<|end|>") == WHOLE.encode("a<|end|>")
    assert (bpe.bos_token_id, bpe.eos_token_ids, bpe.special_ids) == (0, (1,), WHOLE.special_ids)
    assert bpe.vocab_size == WHOLE.vocab_size, "GPT-2's own <|endoftext|> has no embedding here"
    messages = [{"role": "user", "content": "Hi"}]
    assert bpe.apply_chat_template(messages) == WHOLE.apply_chat_template(messages)
    assert Tokenizer.from_json(bpe.to_json()).encode("Hi 12") == WHOLE.encode("Hi 12")


def test_a_whole_model_loads(tmp_path: Path) -> None:
    c = config()
    folder = write_hf(tmp_path, c, [hf_tensors(c)])
    (folder / "tokenizer.json").unlink()
    model = load_model(str(write_bpe(folder)))
    assert model.tokenizer.encode("Rainy weekend") == WHOLE.encode("Rainy weekend")
    assert model.config.eos_token_ids == (1,)


def write_pieces(folder: Path) -> Path:
    """A small SentencePiece model, trained here."""
    text = folder / "text.txt"
    text.write_text("\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py"))))
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=500, model_type="bpe", byte_fallback=True,
        remove_extra_whitespaces=False, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    text.unlink()
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_sentencepiece_files(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_pieces(tmp_path))
    original = sentencepiece.SentencePieceProcessor()
    original.Load(str(tmp_path / "tokenizer.model"))
    for text in ("def test(a: int) -> None:", "Hello, 世界", "two\n\n  lines\t."):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == original.EncodeAsIds(text)
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (2,), 500)


def test_tokenizer_json_of_a_sentencepiece_model(tmp_path: Path) -> None:
    """As Llama 2's: spaces are those of sentencepiece, and text after a special token starts with one."""
    spec = json.loads(load_tokenizer(write_pieces(tmp_path)).backend.to_str())
    original = sentencepiece.SentencePieceProcessor()
    original.Load(str(tmp_path / "tokenizer.model"))
    prepend, spaces = {"type": "Prepend", "prepend": "▁"}, {"String": " "}
    steps = [prepend, {"type": "Replace", "pattern": spaces, "content": "▁"}]
    spec |= {"pre_tokenizer": None, "normalizer": {"type": "Sequence", "normalizers": steps}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = load_tokenizer(tmp_path)
    for text in (" two", "two", "  x\n\n  lines"):
        assert tokenizer.encode(text, add_special_tokens=False) == original.EncodeAsIds(text)
    assert tokenizer.encode("</s>two", add_special_tokens=False) == [2, *original.EncodeAsIds("two")]


def test_without_sentencepiece_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "jaxspec.models.load.hf_tokenizer.find_spec", lambda name: None if name == "sentencepiece" else real(name)
    )
    with pytest.raises(ModelLoadError, match=r'tokenizer.model: .* needs sentencepiece: .*-e ".\[sentencepiece\]"'):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, r"vocab.json: .*(another id|turns)"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, r"vocab.json: .*transformers can't convert it"),
        ({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}, r"vocab.json: .*never run"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    """A wrong class does not fail by itself: it would drop most of the text. A folder's own code is never run."""
    folder = write_bpe(tmp_path, **settings)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()


def test_damaged_pieces_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(ModelLoadError, match=r"tokenizer.model: .*transformers can't convert it"):
        load_tokenizer(tmp_path)


def test_pickled_vocabularies_are_not_tried(tmp_path: Path) -> None:
    (tmp_path / "vocab.pkl").write_bytes(b"")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TransfoXLTokenizer"}))
    with pytest.raises(ModelLoadError, match=r"no tokenizer.json, nor vocab.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((LLAMA / "tokenizer.json").read_bytes())
    (tmp_path / name).write_text("{")
    with pytest.raises(ModelLoadError, match=f"{name}: not readable as JSON"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("installed", [False, True], ids=["no torch", "torch"])
def test_what_is_imported(tmp_path: Path, installed: bool) -> None:
    """transformers for folders alone, silently; torch never, even if it could be: it would take seconds."""
    if installed:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('not needed')")
        (tmp_path / "torch-2.9.0.dist-info").mkdir()
        about = "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n"
        (tmp_path / "torch-2.9.0.dist-info" / "METADATA").write_text(about)
    script = f"""
import sys
from importlib.util import find_spec
import jaxspec.engine.engine
import jaxspec.models.load.gguf
assert bool(find_spec("torch")) == {installed} and "transformers" not in sys.modules
jaxspec.models.load.load_model({str(LLAMA)!r})
assert "transformers" in sys.modules and "torch" not in sys.modules
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, timeout=120, capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_older_files_need_no_torch(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
sys.modules["torch"] = None
from jaxspec.models.load.hf_tokenizer import load_tokenizer
load_tokenizer(Path({str(write_bpe(tmp_path))!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
