"""The proxy predictor: batches of fixed shapes, the same answers in any company, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from helpers import encoders
from jaxspec.compilation import compile_counter
from jaxspec.errors import ModelLoadError
from jaxspec.kernels import cpu
from jaxspec.models.length_head import LengthModel
from jaxspec.models.load.files import quantized, restored, weights_of
from jaxspec.predict import predictor_file as file
from jaxspec.predict import shipped
from jaxspec.predict.build import DEFAULT
from jaxspec.predict.formulation import NAMES
from jaxspec.predict.packed_encoder import PackedEmbed, PackedLinear
from jaxspec.predict.predictor import clip
from jaxspec.predict.proxy import ProxyPredictor

TEXTS = ["short story", "tell me a long story " * 3, "", "list five", "explain code one two three " * 20, "write code"]
#: Four that fill one batch of the most tokens, so that one program reads them all, at every position.
LONG = [text * 20 for text in ("explain code one two three ", "tell me a long story ", "list five ", "write the code ")]


@pytest.fixture(scope="module")
def proxy() -> ProxyPredictor:
    return encoders.proxy()


def test_a_text_keeps_its_end() -> None:
    tokenizer = encoders.tokenizer()
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    words = {word: tokenizer.token_to_id(word) for word in encoders.WORDS}
    assert clip(tokenizer, "tell me a story", 6) == [cls, words["tell"], words["me"], words["a"], words["story"], sep]
    assert clip(tokenizer, "Tell me a story", 4) == [cls, words["a"], words["story"], sep]
    assert clip(tokenizer, "") == [cls, sep] == clip(tokenizer, "tell me", 2)
    assert len(clip(tokenizer, "one " * 600)) == 512
    assert clip(tokenizer, "a \ud800 story") == clip(tokenizer, "a ? story"), "a lone surrogate is no error"


def test_equals_the_model_row_by_row(proxy: ProxyPredictor) -> None:
    """Whatever shares a batch with a text, and however it is padded."""
    found = proxy.predict(TEXTS)
    chex.assert_shape(found, (len(TEXTS),))
    chex.assert_type(found, np.float64)

    @nnx.jit
    def alone(model: LengthModel, ids: jax.Array) -> jax.Array:
        return model(ids, jnp.ones(ids.shape, bool))[0]

    for i, text in enumerate(TEXTS):
        with jax.default_matmul_precision("float32"):
            raw = alone(proxy._model, jnp.asarray([clip(proxy.tokenizer, text, 48)]))
        wanted = proxy.formulation.lengths(np.asarray(raw)[None])[0]
        assert found[i] == pytest.approx(wanted, rel=1e-4)
    assert len(set(found)) == len(TEXTS)


def test_many_texts_in_any_order(proxy: ProxyPredictor) -> None:
    texts = [" ".join(encoders.WORDS[: 1 + i % 16]) * (1 + i % 3) for i in range(37)]
    found = proxy.predict(texts)
    assert proxy.predict(texts[::-1]) == pytest.approx(found[::-1], rel=1e-4)
    chex.assert_shape(proxy.predict([]), (0,))


@pytest.mark.parametrize("longest", [32, pytest.param(48, marks=pytest.mark.slow)])
def test_nothing_compiles_after_warm_up(longest: int) -> None:
    """With rows of one length, and of two."""
    counter = compile_counter()
    proxy = encoders.proxy(layers=1, max_positions=longest)
    proxy.warm_up()
    before = counter.count
    assert before
    for count in (1, 3, 4, 17, 40):
        proxy.predict([TEXTS[i % len(TEXTS)] for i in range(count)])
    assert counter.count == before


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    made = encoders.proxy(name, layers=1)
    made.about["target"] = "tiny"
    path = tmp_path / "new" / "p.safetensors"
    made.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["p.safetensors"]
    loaded = ProxyPredictor.load(path)
    assert (loaded.name, loaded.about, loaded.config) == ("tiny", {"target": "tiny"}, made.config)
    assert loaded.formulation == made.formulation
    assert loaded.tokenizer.to_str() == made.tokenizer.to_str()
    lengths = loaded.predict(LONG)
    if name.startswith("reg"):
        np.testing.assert_allclose(lengths, made.predict(LONG), rtol=0.1)
    again = tmp_path / "again.safetensors"
    loaded.save(again)
    np.testing.assert_array_equal(ProxyPredictor.load(again).predict(LONG), lengths)


def test_an_embedding_of_whole_blocks_is_stored_in_four_bits(tmp_path: Path) -> None:
    made = encoders.proxy(hidden=64)
    made.save(path := tmp_path / "p.safetensors")
    loaded = ProxyPredictor.load(path)
    before, after = (weights_of(p._model)["encoder.tokens.embedding"] for p in (made, loaded))
    step = np.abs(before.reshape(len(before), -1, 32)).max(-1) / 8
    assert (np.abs(after - before).reshape(len(before), -1, 32) <= 1.01 * step[..., None]).all()
    with safe_open(path, framework="numpy") as opened:
        assert opened.get_tensor("encoder.tokens.embedding").shape == (len(before), 2 * 18)
    loaded.save(again := tmp_path / "again.safetensors")
    np.testing.assert_array_equal(ProxyPredictor.load(again).predict(LONG), loaded.predict(LONG))


def test_the_former_format_is_read(saved: Path) -> None:
    wanted = ProxyPredictor.load(saved)
    text = wanted.tokenizer.to_str().encode()
    rewritten(saved, {"format": "jaxspec-length-1"}, {"tokenizer": np.frombuffer(text, np.uint8)})
    np.testing.assert_array_equal(ProxyPredictor.load(saved).predict(LONG), wanted.predict(LONG))


@pytest.mark.parametrize(("hidden", "intermediate"), [(24, 40), (32, 40)])
def test_packed_matrices_predict_the_same(tmp_path: Path, hidden: int, intermediate: int) -> None:
    """The CPU kernels read the file's values, INT8 or Q4_0; sizes are no multiples of a panel."""
    cpu.load()
    encoders.proxy(hidden=hidden, intermediate=intermediate).save(path := tmp_path / "p.safetensors")
    plain, packed = ProxyPredictor.load(path), ProxyPredictor.load(path, kernels=True)
    encoder = packed._model.encoder
    assert isinstance(encoder.tokens, PackedEmbed) and isinstance(encoder.layers[1].down, PackedLinear)
    embed = nnx.jit(lambda encoder, ids: encoder.tokens(ids))
    ids = jnp.arange(packed.config.vocab_size)[None]
    chex.assert_trees_all_equal(embed(encoder, ids), embed(plain._model.encoder, ids))
    found, wanted = packed._run(LONG), plain._run(LONG)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert not np.allclose(wanted[0], wanted[1], rtol=1e-3)
    with pytest.raises(ValueError, match="cannot be saved"):
        packed.save(tmp_path / "again.safetensors")


def test_int8() -> None:
    matrix = np.random.default_rng(0).normal(size=(30, 8)).astype(np.float32) * np.arange(8)
    for rows in (False, True):
        small = quantized("m", matrix, rows) | {"norm.scale": np.ones(3, np.float32)}
        assert small["m"].dtype == np.int8
        back = restored(small)
        assert back.keys() == {"m", "norm.scale"}
        assert (np.abs(back["m"] - matrix) <= small["m.scale"] * 0.5 + 1e-6).all()
    assert not restored(quantized("m", matrix))["m"][:, 0].any()


@pytest.fixture
def saved(tmp_path: Path, proxy: ProxyPredictor) -> Path:
    path = tmp_path / "p.safetensors"
    proxy.save(path)
    return path


def test_files_that_are_no_predictor(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot read predictor"):
        ProxyPredictor.load(tmp_path / "nowhere.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({"a": np.zeros(3)}, other)
    with pytest.raises(ModelLoadError, match="not a length predictor"):
        ProxyPredictor.load(other)
    whole = saved.read_bytes()
    saved.write_bytes(whole[:-100])
    with pytest.raises(ModelLoadError, match="cannot read predictor"):
        ProxyPredictor.load(saved)
    at = len(whole) - 50
    saved.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(ModelLoadError, match=r"damaged.*digest"):
        ProxyPredictor.load(saved)


def rewritten(path: Path, changes: dict[str, str], tensors: dict[str, np.ndarray | None]) -> None:
    """The file as another program might have written it, with a digest that fits."""
    with safe_open(path, framework="numpy") as opened:
        metadata: dict[str, Any] = opened.metadata() | changes
        stored = {key: opened.get_tensor(key) for key in opened.keys()} | tensors  # noqa: SIM118
    stored = {key: value for key, value in stored.items() if value is not None}
    del metadata["digest"]
    metadata["digest"] = file._digest(stored, metadata)
    save_file(stored, path, metadata)


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"format": "jaxspec-length-9"}, {}, "has format 9, this version of jaxspec reads 2"),
        ({"formulation": '{"name": "cls"}'}, {}, "formulation cls must have the fields"),
        ({"formulation": "{"}, {}, "predictor .*:"),
        ({"encoder": '{"hidden": 3}'}, {}, "predictor .*: .*vocab_size"),
        ({}, {"tokenizer": np.zeros(3, np.uint8)}, "cannot read its tokenizer"),
        ({}, {"encoder.layers.1.o.kernel": None, "encoder.layers.1.o.kernel.scale": None}, "o.kernel is missing"),
        ({}, {"encoder.layers.0.o.kernel.scale": None}, "o.kernel.scale is missing"),
        ({}, {"encoder.extra": np.zeros(3)}, "encoder.extra is not expected"),
        ({}, {"encoder.norm.bias": np.zeros(3)}, r"encoder.norm.bias has shape \[3\], not \[16\]"),
    ],
)
def test_files_that_do_not_fit_together(saved: Path, changes: Any, tensors: Any, message: str) -> None:
    rewritten(saved, changes, tensors)
    with pytest.raises(ModelLoadError, match=message):
        ProxyPredictor.load(saved)


@pytest.mark.slow
def test_the_shipped_predictors_are_small_and_know_short_from_long() -> None:
    files = shipped()
    assert set(DEFAULT.values()) == files.keys() and all(path.stat().st_size <= 18e6 for path in files.values())
    proxy = ProxyPredictor.load(files["smollm2-length"])
    turn = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\nuser\n{}\nassistant\n"
    asked = ("Is the sky blue? Answer yes or no.", "Write a long story about a fox who leaves the forest.")
    short, long = proxy.predict([turn.format(text) for text in asked])
    assert 1 <= short < 0.5 * long <= 1024
