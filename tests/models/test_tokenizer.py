"""Text, ids and bytes: byte-level BPE and SentencePiece vocabularies, special tokens, chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import GOLDEN, byte_vocabulary
from jaxspec.errors import ModelLoadError
from jaxspec.models.load import Tokenizer, load_model
from jaxspec.models.load.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from jaxspec.models.load.hf_tokenizer import load_tokenizer

SPM = json.loads((GOLDEN / "spm.json").read_text(encoding="utf-8"))[0]
SMOLLM2 = json.loads((GOLDEN / "smollm2.json").read_text(encoding="utf-8"))


def spm(**changes: Any) -> Tokenizer:
    fields: dict[str, Any] = {
        "model": "llama",
        "tokens": SPM["tokens"],
        "scores": SPM["scores"],
        "token_type": [TokenType[kind.upper()] for kind in SPM["types"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items()}, "test")


BYTE_LEVEL, SENTENCEPIECE = load_tokenizer(GOLDEN / "llama"), spm()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bpe", "spm"])
#: Any text that doesn't spell a special token.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"))


@given(text=TEXT)
def test_bytes_are_exact(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()
    assert BYTE_LEVEL.decode(ids) == text
    # SentencePiece puts a space before the text; as in the original, decoding takes it away.
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    assert b"".join(map(SENTENCEPIECE.token_bytes, ids)) == (b" " if text else b"") + text.replace("▁", " ").encode()
    assert SENTENCEPIECE.decode(ids) == text.replace("▁", " ")


@BOTH
@given(ids=st.lists(st.integers(-5, 600)))
def test_any_ids_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert isinstance(tokenizer.decode(ids), str)
    for i in ids:
        assert isinstance(tokenizer.token_text(i), str)
        assert i in range(tokenizer.vocab_size) or tokenizer.token_bytes(i) == b""


def test_every_byte_has_its_token() -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        assert {bytes([b]) for b in range(256)} <= {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert SENTENCEPIECE.token_bytes(SPM["tokens"].index("<0x0A>")) == b"\n"


def test_sentencepiece_is_equalled() -> None:
    """The ids that sentencepiece gave, recorded."""
    for text, ids in SPM["cases"]:
        assert SENTENCEPIECE.encode(text, add_special_tokens=False) == ids, text
        assert SENTENCEPIECE.encode(text) == [1, *ids]
    without = spm(add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    assert without.decode(without.encode(" a")) == " a"
    assert without.encode("a")[-1] == 2


def test_special_tokens() -> None:
    assert BYTE_LEVEL.special_ids == {0, 1}
    ids = BYTE_LEVEL.encode("a<|end|>", add_special_tokens=False)
    assert ids[-1] == 1
    assert BYTE_LEVEL.decode(ids) == "a"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "a<|end|>"
    assert BYTE_LEVEL.token_bytes(1) == b"<|end|>"
    assert (BYTE_LEVEL.bos_token_id, BYTE_LEVEL.eos_token_ids, BYTE_LEVEL.vocab_size) == (0, (1,), 320)
    assert SENTENCEPIECE.special_ids == {1, 2}
    assert SENTENCEPIECE.encode("</s>", add_special_tokens=False) == [2]


def test_user_defined_tokens_are_text() -> None:
    kinds = [TokenType[kind.upper()] for kind in SPM["types"]]
    kinds[300] = TokenType.USER_DEFINED
    tokenizer = spm(token_type=kinds, tokens=[*SPM["tokens"][:300], "<tool é>", *SPM["tokens"][301:]])
    assert 300 in tokenizer.encode("x<tool é>y")
    assert 300 not in tokenizer.special_ids
    assert tokenizer.token_bytes(300) == "<tool é>".encode()


def test_broken_unicode_is_replaced() -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("a\ud800b", add_special_tokens=False)) == "a?b"
    euro = BYTE_LEVEL.encode("€", add_special_tokens=False)
    assert b"".join(map(BYTE_LEVEL.token_bytes, euro)) == "€".encode()
    assert BYTE_LEVEL.token_text(next(i for i in range(320) if BYTE_LEVEL.token_bytes(i) == b"\xe2")) == "\ufffd"


def test_gguf_vocabulary_equals_the_folder() -> None:
    tokenizer = gguf_tokenizer(byte_vocabulary("gpt-2"), "test")
    for text in ("", "Rainy weekend <|end|> 12,50 €", "  two\n\n\tlines"):
        assert tokenizer.encode(text) == BYTE_LEVEL.encode(text)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages) == BYTE_LEVEL.apply_chat_template(messages)
    assert tokenizer.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'ll", " pay", "  ", " 1234", "€,", " DON", "'", "T", " ask", "\n\n"]),
        ("smollm", ["I", "'ll", " pay", "   ", "1", "2", "3", "4", "€,", " DON", "'", "T", " ask", "\n\n"]),
        ("llama-bpe", ["I", "'ll", " pay", "  ", " ", "123", "4", "€,", " DON", "'T", " ask", "\n\n"]),
        ("qwen2", ["I", "'ll", " pay", "  ", " ", "1", "2", "3", "4", "€,", " DON", "'T", " ask", "\n\n"]),
        ("tekken", ["I", "'ll", " pay", "  ", " ", "1", "2", "3", "4", "€,", " DON", "'T", " ask", "\n\n"]),
        ("default", ["I", "'", "ll", " pay", "  ", " ", "123", "4", "€", ",", " DON", "'", "T", " ask", "\n\n"]),
    ],
)
def test_pre_tokenizers(pre: str, words: list[str]) -> None:
    backend = gguf_tokenizer(byte_vocabulary(pre), "test").backend
    text = "I'll pay   1234€, DON'T ask\n\n"
    assert backend.pre_tokenizer is not None
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[a:b] for a, b in spans] == words


def test_every_pre_tokenizer_builds() -> None:
    for pre in PRE_TOKENIZERS:
        tokenizer = gguf_tokenizer(byte_vocabulary(pre), "test")
        assert tokenizer.decode(tokenizer.encode("a 1 é")) == "a 1 é"
    llama3 = gguf_tokenizer(byte_vocabulary("llama-bpe"), "test")
    assert llama3.encode("a")[0] == 0, "starts with the start token unless the file says otherwise"


def test_inconsistent_vocabularies() -> None:
    with pytest.raises(ModelLoadError, match="no vocabulary"):
        gguf_tokenizer({"tokenizer.ggml.model": "gpt2"}, "test")
    with pytest.raises(ModelLoadError, match="not consistent"):
        spm(bos_token_id=10_000)
    with pytest.raises(ModelLoadError, match="not consistent"):
        spm(token_type=[1])


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(BYTE_LEVEL.backend, chat_template=template, template_tokens={"bos_token": "<|start|>"})


def test_chat_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "<|start|>system\nBe brief.<|end|><|start|>user\nHi<|end|>"
    assert BYTE_LEVEL.apply_chat_template(messages) == text + "<|start|>assistant\n"
    assert BYTE_LEVEL.apply_chat_template(messages, add_generation_prompt=False) == text
    assert BYTE_LEVEL.has_chat_template and not SENTENCEPIECE.has_chat_template
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}\n"
        "  {% generation %}{{ m.content }}{% endgeneration %}{{ tools | tojson }}\n"
        "{% endfor %}{{ strftime_now('%%') }}{{ mode }}"
    )
    messages = [{"role": "tool", "content": "no"}, {"role": "user", "content": "<é>"}]
    rendered = with_template(source).apply_chat_template(messages, tools=[{"name": "é<"}], mode="!")
    assert rendered == '<|start|><é>[{"name": "é<"}]\n%!'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{% if %}", "not valid"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "can't render"),
        ("{{ messages[7].content }}", "can't render"),
        ("{{ ''.__class__.__mro__ }}", "can't render"),
        ("{{ messages.append(1) }}", "can't render"),
        ("{% for i in range(10**9) %}{% endfor %}", "can't render"),
    ],
)
def test_chat_template_refused(template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_template(template).apply_chat_template([{"role": "user", "content": "Hi"}])


def test_named_chat_templates(tmp_path: Any) -> None:
    """Several templates: `tool_use` for tools, else the default one. A token may be given with its flags."""
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "llama" / "tokenizer.json").read_bytes())
    templates = {"rag": "no", "default": "{{ eos_token }}", "tool_use": "{{ tools[0] }}{{ eos_token }}"}
    named = [{"name": name, "template": template} for name, template in templates.items()]
    settings = {"chat_template": named, "eos_token": {"__type": "AddedToken", "content": "<|end|>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == (1,)
    for each in (tokenizer, Tokenizer.from_json(tokenizer.to_json())):
        assert each.apply_chat_template([]) == each.apply_chat_template([], tools=[]) == "<|end|>"
        assert each.apply_chat_template([], tools=["search"]) == "search<|end|>"


def test_templates_in_files(tmp_path: Any) -> None:
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "llama" / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (tmp_path / "chat_template.jinja").write_text("default")
    assert load_tokenizer(tmp_path).apply_chat_template([], tools=["search"]) == "default"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template([]) == "default"
    assert tokenizer.apply_chat_template([], tools=["search"]) == "tools"


def test_gguf_tool_template() -> None:
    fields = byte_vocabulary("gpt-2") | {"tokenizer.chat_template.tool_use": "{{ tools[0] }}"}
    assert gguf_tokenizer(fields, "test").apply_chat_template([], tools=["search"]) == "search"


@BOTH
def test_json_round_trip(tokenizer: Tokenizer) -> None:
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.to_json() == tokenizer.to_json()
    assert again.encode("Hello, 世界") == tokenizer.encode("Hello, 世界")


@pytest.mark.slow
def test_smollm2_prompts_are_those_recorded() -> None:
    tokenizer = load_model("smollm2-135m").tokenizer
    assert [tokenizer.token_text(i) for i in tokenizer.eos_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    for case in SMOLLM2:
        text = tokenizer.apply_chat_template(case["messages"])
        assert tokenizer.encode(text, add_special_tokens=False) == case["prompt_ids"]
        assert b"".join(map(tokenizer.token_bytes, case["prompt_ids"])).decode() == text
