"""Embeddings of the pre-trained encoder, and the texts that it reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import tiny
from helpers.fakes import ByteTokenizer, as_tokenizer
from helpers.paths import GOLDEN
from jaxspec.compilation import compile_counter
from jaxspec.config import ConfigError
from jaxspec.models.bert import mean_pool
from jaxspec.models.load.bert import load_bert
from jaxspec.models.load.tokenizer import ChatTemplate, Tokenizer
from jaxspec.predict.build import load_encoder
from jaxspec.predict.predictor import clip
from jaxspec.predict.sentence_encoder import SentenceEncoder
from jaxspec.predict.user_text import user_text

FOLDER = str(GOLDEN / "encoder")
TEXTS = ["a story", "tell me a long story of owls " * 9, "", "write code"]


@pytest.mark.slow
def test_embeddings_are_those_of_the_whole_encoder():
    encoder, loaded = SentenceEncoder.load(FOLDER), load_bert(FOLDER)
    found = encoder.embed(TEXTS)
    assert found.shape == (4, loaded.config.hidden) and found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    for text, vector in zip(TEXTS, found, strict=True):
        ids = jnp.asarray([clip(loaded.tokenizer, text, min(256, loaded.config.max_positions))])
        mask = jnp.ones(ids.shape, bool)
        with jax.default_matmul_precision("float32"):
            np.testing.assert_allclose(vector, mean_pool(loaded.encoder(ids, mask), mask)[0], atol=1e-5)


def test_embedding_compiles_nothing_after_warm_up():
    counter, encoder = compile_counter(), load_encoder(FOLDER)
    encoder.warm_up()
    before = counter.count
    for count in (1, 5, 21):
        encoder.embed([TEXTS[i % 4] for i in range(count)])
    assert counter.count == before


def test_an_encoder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"retrieval\.encoder: no encoder .*nowhere"):
        load_encoder(str(tmp_path / "nowhere"))


# --- what users wrote ------------------------------------------------------------------------------------------------

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if m.role == 'system' %}<<SYS>>\n{{ m.content }}\n<</SYS>>\n\n"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} {% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
)


@pytest.fixture(params=[CHATML, LLAMA, NO_SYSTEM], ids=["chatml", "llama", "no system"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Bytes, and the special tokens of ChatML."""

    template = ChatTemplate(request.param)

    class Templated(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            for special in ("<|im_start|>", "<|im_end|>"):
                text = text.replace(special, "")
            return list(text.encode())

        def apply_chat_template(self, messages, add_generation_prompt=True, continue_final_message=False, **kw):
            return template.render(messages, add_generation_prompt=add_generation_prompt)

    return as_tokenizer(Templated())


def prompt(tokenizer: Tokenizer, *messages: tuple[str, str]) -> str:
    rendered = tokenizer.apply_chat_template([{"role": role, "content": content} for role, content in messages])
    return tokenizer.decode(tokenizer.encode(rendered, add_special_tokens=False))


def test_the_template_is_taken_off(tokenizer):
    strip = user_text(tokenizer)
    assert strip(prompt(tokenizer, ("user", "Tell me\n\nof owls"))) == "Tell me\n\nof owls"
    turns = prompt(tokenizer, ("user", "Owls?"), ("assistant", "Birds."), ("user", "More"))
    assert "\n".join(line.strip() for line in strip(turns).splitlines()) in (
        "Owls?\nBirds.\nMore",
        "Owls?\nBirds. \nMore",
    )
    assert strip("no chat, user") == "no chat, user" and strip("") == ""


def test_a_system_prompt_is_no_users_text():
    class Templated(ByteTokenizer):
        def apply_chat_template(self, messages, add_generation_prompt=True, continue_final_message=False, **kw):
            return "".join(f"[{m['role']}]{m['content']}\n" for m in messages) + "[assistant]"

    tokenizer = as_tokenizer(Templated())
    strip = user_text(tokenizer)
    assert strip(prompt(tokenizer, ("system", "Answer in\nrhyme"), ("user", "Owls?"))) == "Owls?"
    assert strip(prompt(tokenizer, ("user", "Owls?"))) == "Owls?"


def test_without_a_template_all_is_the_users():
    plain = ByteTokenizer()
    plain.has_chat_template = False
    assert user_text(as_tokenizer(plain))("user\nOwls") == "user\nOwls"
    assert user_text(tiny.model().tokenizer)("[user]Owls\n[assistant]") == "Owls"
