"""Quantised Hugging Face checkpoints: FP8 and INT8 weights with scales; others are refused with what to use instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.checkpoints import config, hf_tensors, write_hf
from jaxspec import LLM, SamplingParams
from jaxspec.errors import ModelLoadError
from jaxspec.models.load import load_model
from jaxspec.models.load.weights import stored_of

FP8 = ml_dtypes.float8_e4m3fn


def group(bits: int = 8, strategy: str = "channel", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "strategy": strategy, "symmetric": True, "type": "int"} | more
    groups = {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file, with types that the library does not write from numpy."""
    kinds = {np.dtype(np.int8): "I8", np.dtype(FP8): "F8_E4M3", np.dtype(np.float32): "F32"}
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def quantised(kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Settings, stored tensors, and the values that they stand for."""
    rng = np.random.default_rng(0)
    stored: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    for name, tensor in hf_tensors(config()).items():
        values[name] = stored[name] = tensor
        if not name.endswith("proj.weight"):
            continue
        rows, columns = tensor.shape
        match kind:
            case "int8 per channel":
                codes, scale = rng.integers(-127, 128, tensor.shape, np.int8), rng.uniform(0.01, 0.02, (rows, 1))
            case "int8 per tensor":
                codes, scale = rng.integers(-127, 128, tensor.shape, np.int8), np.asarray([0.015])
            case "fp8 per channel":
                codes, scale = tensor.astype(FP8), rng.uniform(0.5, 2, (rows, 1))
            case _:  # blocks that do not divide the matrix
                codes, scale = tensor.astype(FP8), rng.uniform(0.5, 2, (-(-rows // 48), -(-columns // 40)))
        scale = scale.astype(np.float32)
        wide = scale if kind != "fp8 in blocks" else np.repeat(np.repeat(scale, 48, 0), 40, 1)[:rows, :columns]
        stored |= {name: codes, name + ("_scale_inv" if kind == "fp8 in blocks" else "_scale"): scale}
        values[name] = codes.astype(np.float32) * wide
    settings = {
        "int8 per channel": group(), "int8 per tensor": group(strategy="tensor"),
        "fp8 per channel": {"quant_method": "fbgemm_fp8"},
        "fp8 in blocks": {"quant_method": "fp8", "weight_block_size": [48, 40]},
    }  # fmt: skip
    return settings[kind], stored, values


@pytest.mark.parametrize("kind", ["int8 per channel", "int8 per tensor", "fp8 per channel", "fp8 in blocks"])
def test_weights_are_the_checkpoints(kind: str, tmp_path: Path) -> None:
    settings, stored, values = quantised(kind)
    plain = load_model(str(write_hf(tmp_path / "plain", config(), [values])))
    folder = write_hf(tmp_path / "quantised", config(), [hf_tensors(config())], quantization_config=settings)
    save(folder / "model.safetensors", stored | {"model.layers.0.self_attn.q_proj.input_scale": np.ones(1, np.float32)})
    loaded = load_model(str(folder))
    for name, weight in plain.weights.items():
        np.testing.assert_array_equal(np.asarray(loaded.weights[name], np.float32), weight)
    for part in stored_of(loaded.weights)["layers.0.qkv"]:
        assert (part.kind == "I8") == kind.startswith("int8")
    sizes: dict[str, Any] = dict(kv_cache_tokens=128, max_num_seqs=1, max_num_batched_tokens=16, token_buckets=[16])
    tokens = []
    for model in (plain, loaded):
        with LLM(model, draft=[], compilation_cache_dir="", page_size=16, max_model_len=64, **sizes) as llm:
            out = llm.generate([list(range(2, 12))], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
            tokens.append(out.outputs[0].token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq"}, "quantised by gptq cannot be read; use the original weights or a Q4_K_M .gguf"),
        ({"quant_method": "awq"}, "quantised by awq .* Q4_K_M .gguf"),
        ({"quant_method": "mxfp4"}, "quantised by mxfp4"),
        ({"bits": 4}, "quantised by an unknown method"),
        (group(bits=4), "config_groups.group_0: weights of 4 bits"),
        (group(strategy="group"), "with a scale per group"),
        (group(symmetric=False), "symmetric ones of 8 bits"),
        (group() | {"format": "pack-quantized"}, "format 'pack-quantized'"),
    ],
)
def test_what_cannot_be_read_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_hf(tmp_path, config(), [hf_tensors(config())], quantization_config=settings)
    with pytest.raises(ModelLoadError, match=message):
        load_model(str(folder))


def test_a_scale_that_does_not_fit_is_named(tmp_path: Path) -> None:
    settings, stored, _ = quantised("int8 per channel")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    folder = write_hf(tmp_path, config(), [hf_tensors(config())], quantization_config=settings)
    save(folder / "model.safetensors", stored | {name: np.ones((5, 1), np.float32)})
    with pytest.raises(ModelLoadError, match=rf"{name} has the shape \[5, 1\]"):
        load_model(str(folder))
