"""Checkpoints in, weights and configuration out: Hugging Face folders, GGUF files, and what is wrong with bad ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import gguf
import ml_dtypes
import numpy as np
import pytest

from helpers.checkpoints import GOLDEN, config, gguf_tensors, hf_tensors, write_gguf, write_hf
from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig, RopeScaling
from jaxspec.models.load import LoadedModel, load_model
from jaxspec.models.load.gguf_tensors import TensorInfo
from jaxspec.models.load.hf_config import decoder_config
from jaxspec.models.load.loaded import Header, load_header, save_header
from jaxspec.models.load.weights import Weights
from jaxspec.models.rotary import inverse_frequencies

VARIANTS = [
    config(),
    config(tie_embeddings=True, qkv_bias=True, o_bias=True),
    config(family="qwen2", qkv_bias=True),
    config(family="qwen3", qk_norm="head", head_dim=32),
]
Kind = gguf.GGMLQuantizationType


def expected(c: DecoderConfig) -> dict[str, np.ndarray]:
    """Fused by hand from the same random tensors."""
    t = hf_tensors(c)
    out = {"embed": t["model.embed_tokens.weight"], "norm": t["model.norm.weight"]}
    if not c.tie_embeddings:
        out["head"] = t["lm_head.weight"].T
    for i in range(c.num_layers):
        at, our = f"model.layers.{i}.", f"layers.{i}."
        q, k, v = (t[f"{at}self_attn.{p}_proj.weight"].T for p in "qkv")
        out[our + "qkv"] = np.hstack([q, k, v])
        if c.qkv_bias:
            out[our + "qkv_bias"] = np.hstack([t[f"{at}self_attn.{p}_proj.bias"] for p in "qkv"])
        if c.o_bias:
            out[our + "o_bias"] = t[f"{at}self_attn.o_proj.bias"]
        if c.qk_norm:
            out |= {our + f"{p}_norm": t[f"{at}self_attn.{p}_norm.weight"] for p in "qk"}
        out[our + "o"] = t[at + "self_attn.o_proj.weight"].T
        out[our + "gate_up"] = np.hstack([t[at + "mlp.gate_proj.weight"].T, t[at + "mlp.up_proj.weight"].T])
        out[our + "down"] = t[at + "mlp.down_proj.weight"].T
        out[our + "attn_norm"] = t[at + "input_layernorm.weight"]
        out[our + "mlp_norm"] = t[at + "post_attention_layernorm.weight"]
    return out


def assert_weights(loaded: Weights, wanted: Weights, atol: float = 0, dtype: Any = np.float32) -> None:
    chex.assert_type(list(loaded.values()), dtype)
    widened = {name: weight.astype(np.float32) for name, weight in loaded.items()}
    chex.assert_trees_all_close(widened, dict(wanted), rtol=0, atol=atol)


def shape(c: DecoderConfig) -> DecoderConfig:
    return replace(c, eos_token_ids=(), bos_token_id=None)


@pytest.mark.parametrize("c", VARIANTS, ids=lambda c: c.family)
def test_folder(tmp_path: Path, c: DecoderConfig) -> None:
    model = load_model(str(write_hf(tmp_path / "m", c, [hf_tensors(c)])))
    assert_weights(model.weights, expected(c))
    assert shape(model.config) == c
    assert (model.name, model.config.eos_token_ids, model.config.bos_token_id) == ("m", (1,), 0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_shards_of_half_precision(tmp_path: Path, dtype: Any) -> None:
    c = config()
    halves = {name: tensor.astype(dtype) for name, tensor in hf_tensors(c).items()}
    names = sorted(halves)
    shards = [{n: halves[n] for n in names[i::3]} for i in range(3)]
    model = load_model(str(write_hf(tmp_path, c, shards)))
    wanted = {name: weight.astype(dtype).astype(np.float32) for name, weight in expected(c).items()}
    assert_weights(model.weights, wanted, dtype=dtype)


@pytest.mark.parametrize("c", VARIANTS, ids=lambda c: c.family)
def test_gguf(tmp_path: Path, c: DecoderConfig) -> None:
    model = load_model(str(write_gguf(tmp_path / "m.gguf", c, gguf_tensors(c))))
    assert_weights(model.weights, expected(c))
    assert shape(model.config) == c
    assert (model.name, model.config.eos_token_ids, model.config.bos_token_id) == ("m", (1,), 0)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (Kind.F16, 0.01),
        (Kind.BF16, 0.05),
        (Kind.Q8_0, 0.05),
        (Kind.Q5_0, 0.5),
        (Kind.Q5_1, 0.5),
        (Kind.Q4_0, 0.9),
        (Kind.Q4_1, 0.9),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_gguf_quantised(tmp_path: Path, kind: Kind, step: float) -> None:
    c = config()
    model = load_model(str(write_gguf(tmp_path / "m.gguf", c, gguf_tensors(c), kind)))
    assert_weights(model.weights, expected(c), atol=step)


def test_gguf_rope_scalings(tmp_path: Path) -> None:
    c = config()
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    model = load_model(str(write_gguf(tmp_path / "linear.gguf", c, gguf_tensors(c), extra=linear)))
    assert model.config.rope_scaling == RopeScaling("linear", 4.0)

    scaling = RopeScaling("llama3", 8.0, original_max_position=2048)
    scaled = replace(c, rope_scaling=scaling, rope_theta=500000.0)
    divisors = inverse_frequencies(replace(scaled, rope_scaling=None)) / inverse_frequencies(scaled)
    stored = gguf_tensors(c) | {"rope_freqs.weight": divisors.astype(np.float32)}
    model = load_model(str(write_gguf(tmp_path / "llama3.gguf", scaled, stored)))
    assert model.config.rope_scaling == scaling

    stored["rope_freqs.weight"] = np.linspace(1, 3, c.head_dim // 2, dtype=np.float32)
    with pytest.raises(ModelLoadError, match="llama3 rule"):
        load_model(str(write_gguf(tmp_path / "odd.gguf", c, stored)))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        ({"tokenizer.ggml.model": "t5"}, "vocabulary kind 't5'"),
        ({"tokenizer.ggml.pre": "martian"}, "pre-tokenizer 'martian'.*smollm"),
        ({"tokenizer.ggml.merges": ["no token"]}, "vocabulary is not consistent"),
        ({"split.count": 2}, "split model"),
        ({"llama.attention.value_length": 8}, "attention.value_length other than that of keys is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8 of 16 is not supported"),
        ({"llama.expert_count": 2, "llama.expert_used_count": 3}, "expert_used_count must be between 1"),
    ],
)
def test_gguf_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    c = config()
    path = write_gguf(tmp_path / "m.gguf", c, gguf_tensors(c), extra=extra)
    with pytest.raises(ModelLoadError, match=message):
        load_model(str(path))


def test_gguf_broken(tmp_path: Path) -> None:
    c = config()
    path = write_gguf(tmp_path / "m.gguf", c, gguf_tensors(c))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelLoadError, match="not a readable GGUF"):
        load_model(str(path))
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelLoadError, match="not a readable GGUF"):
        load_model(str(path))
    stored = gguf_tensors(c)
    whole_numbers = {"output_norm.weight": stored["output_norm.weight"].astype(np.int8)}
    with pytest.raises(ModelLoadError, match=r"tensor output_norm.weight is quantised as I8, which can't be read"):
        load_model(str(write_gguf(tmp_path / "i8.gguf", c, stored | whole_numbers)))
    with pytest.raises(ModelLoadError, match=r"'rwkv7' is not supported; llama, qwen2, "):
        load_model(str(write_gguf(tmp_path / "g.gguf", replace(c, family="rwkv7"), {})))


def test_tensors_that_are_wrong_are_named(tmp_path: Path) -> None:
    c, name = config(), "model.layers.1.mlp.down_proj.weight"
    good = hf_tensors(c)

    def load(tensors: dict[str, np.ndarray]) -> LoadedModel:
        return load_model(str(write_hf(tmp_path, c, [tensors])))

    with pytest.raises(ModelLoadError, match=f"{name} missing"):
        load({n: t for n, t in good.items() if n != name})
    with pytest.raises(ModelLoadError, match=r"unexpected tensor model.layers.0.extra"):
        load(good | {"model.layers.0.extra": np.zeros(3, np.float32)})
    with pytest.raises(ModelLoadError, match=rf"{name} has shape \[96, 64\], the configuration says \[64, 96\]"):
        load(good | {name: np.ascontiguousarray(good[name].T)})
    with pytest.raises(ModelLoadError, match=f"{name} is of type I32"):
        load(good | {name: good[name].astype(np.int32)})
    bias = "model.layers.0.self_attn.o_proj.bias"
    load(good | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    with pytest.raises(ModelLoadError, match=f"unexpected tensor {bias}"):
        load(good | {bias: np.ones(64, np.float32)})


def test_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    c = config()
    good = hf_tensors(c)
    folder = write_hf(tmp_path / "m", c, [good])
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ModelLoadError, match=r"model.safetensors: not a readable safetensors"):
        load_model(str(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickled weights"):
        load_model(str(folder))
    folder = write_hf(tmp_path / "sharded", c, [good, {}])
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"shard model-00001-of-00002.safetensors is missing"):
        load_model(str(folder))
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="outside the folder"):
        load_model(str(folder))
    folder = write_hf(tmp_path / "m", c, [good])
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="not a readable tokenizer"):
        load_model(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no tokenizer.json, nor vocab.json with merges.txt"):
        load_model(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config.json: not readable as JSON"):
        load_model(str(folder))


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    c = config()
    folder = write_hf(tmp_path, c, [hf_tensors(c)], eos_token_id=5)
    assert load_model(str(folder)).config.eos_token_ids == (5, 1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert load_model(str(folder)).config.eos_token_ids == (7, 1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [c.vocab_size, 7]}))
    loaded = load_model(str(folder))
    assert loaded.config.eos_token_ids == loaded.tokenizer.eos_token_ids == (7, 1)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def test_config_defaults_and_spellings() -> None:
    c = decoder_config(LLAMA, "")
    assert (c.num_kv_heads, c.head_dim, c.rope_theta, c.max_position, c.tie_embeddings) == (4, 16, 10000.0, 2048, False)
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    wanted = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    old = decoder_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | llama3}, "")
    new = decoder_config(LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | llama3}, "")
    assert old.rope_scaling == new.rope_scaling == wanted
    assert old.rope_theta == new.rope_theta == 5e5
    linear = decoder_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}}, "")
    assert linear.rope_scaling == RopeScaling("linear", 2.0)


def test_config_windows() -> None:
    def window(**raw: Any) -> tuple[int | None, tuple[int, ...]]:
        c = decoder_config(LLAMA | {"sliding_window": 8, "num_key_value_heads": 2} | raw, "")
        return c.sliding_window, c.windowed_layers

    assert window() == (None, ())
    assert window(model_type="mistral") == (8, ())
    assert window(model_type="mistral", sliding_window=None) == (None, ())
    assert window(model_type="qwen2") == (None, ())
    assert window(model_type="qwen2", use_sliding_window=True, max_window_layers=3) == (8, (3,))
    assert window(model_type="qwen2", use_sliding_window=True, max_window_layers=0) == (8, ())
    assert window(model_type="qwen3", use_sliding_window=True, max_window_layers=9) == (None, ())
    kinds = ["sliding_attention", "full_attention"] * 2
    assert window(model_type="qwen3", use_sliding_window=True, layer_types=kinds) == (8, (0, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is not supported; llama, mistral",
        ),
        ({"model_type": None}, r"^config.json names no model_type: .* is not supported; llama, mistral"),
        ({"model_type": None, "architectures": ["Odd"]}, "'Odd' is not supported"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4}}, "'ntk' is not supported; linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' needs a positive factor"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' needs original_max_position_embeddings"),
        (
            {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 8, "short_factor": [1.0]}},
            "'longrope' needs 8 positive numbers in short_factor",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "needs a positive low_freq_factor"),
        ({"rope_parameters": {"chunked_attention": {"rope_theta": 1}}}, "rotary parameters of chunked_attention"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh'"),
        ({"model_type": "opt", "ffn_dim": 96, "do_layer_norm_before": False}, "do_layer_norm_before False"),
        ({"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 32}, "word_embed_proj_dim 32"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, r"mlp_only_layers \[1\]"),
        ({"model_type": "qwen3_moe", "num_experts": "8"}, "count of experts"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "8 of 4 experts"),
        ({"hidden_size": "many"}, "hidden_size must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_config_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        decoder_config(LLAMA | change, "config.json")


def test_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match=r"no model 'nonsense'.*smollm2-135m"):
        load_model("nonsense")
    with pytest.raises(ModelLoadError, match="no model"):
        load_model("some/missing.gguf")
    with pytest.raises(ModelLoadError, match=r"no config.json"):
        load_model(str(tmp_path))
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"only .gguf files"):
        load_model(str(tmp_path / "model.pt"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"hub model 'jaxspec-tests/absent': the hub can't be reached"):
        load_model("jaxspec-tests/absent")


def test_a_cached_header(tmp_path: Path) -> None:
    """What is kept of a built-in model's file is as it was, and never in place of something else."""
    path = tmp_path / "m.json"
    model = load_model(str(GOLDEN / "llama3_rope"))
    header = Header(model.config, model.tokenizer, {"a": TensorInfo("Q4_1", (3, 64), 128, 120)})
    assert load_header(path, "a") is None
    save_header(header, path, "a")
    again = load_header(path, "a")
    assert again is not None and (again.config, again.tensors) == (header.config, header.tensors)
    assert again.tokenizer.to_json() == model.tokenizer.to_json()
    assert load_header(path, "b") is None
    for content in (path.read_bytes()[:-1], b"[]", b'{"layout": 2}', path.read_bytes().replace(b'"offset"', b'"at"')):
        path.write_bytes(content)
        assert load_header(path, "a") is None
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]
