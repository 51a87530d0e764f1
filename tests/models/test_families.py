"""Every family against transformers on torch in float32 (tests/golden/record_families.py made the files)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import families, family_gguf
from helpers.generation import check_clean, tokens_of
from jaxspec import LLM, SamplingParams
from jaxspec.models.decoder import Decoder, device_weights, forward
from jaxspec.models.layers import XLA, Operations
from jaxspec.models.load import LoadedModel, load_model
from jaxspec.models.load.hf_families import FAMILIES
from jaxspec.step.gpu import GpuLayers

RECORDED = families.recorded()
#: Served in every run with the native kernels; the others in `make test-families`.
ALWAYS = [("gemma3", "native"), ("mixtral", "native")]
_OTHERS = [pytest.mark.slow, pytest.mark.families]
SERVED = [
    (name, kernels) if (name, kernels) in ALWAYS else pytest.param(name, kernels, marks=_OTHERS)
    for name in RECORDED
    for kernels in ("native", "xla")
]
#: Those that exist as GGUF files, in which the weights of the experts always sum to 1.
GGUF = [
    name
    for name, entry in RECORDED.items()
    if entry["config"]["model_type"] in family_gguf.FAMILIES and name != "qwen3_moe_unnormalised"
]
SIZES: dict[str, Any] = dict(
    page_size=16, kv_cache_tokens=512, max_num_seqs=4, max_model_len=64, token_buckets=[8],
    max_num_batched_tokens=8, compilation_cache_dir="", compile_in_background=False,
)  # fmt: skip
_SWAPPING: dict[str, Any] = dict(order="las", memory="swap", kv_cache_tokens=128)
_TREES: dict[str, Any] = dict(draft=["truncated:1", "ngram"], tree="fixed")
#: By kernels, settings under which the tokens are the same as in plain decoding.
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "native": {
        "trees": _TREES,
        "chains and swapping": dict(draft=["truncated:2"], tree="chain", draft_depth=3) | _SWAPPING,
    },
    "xla": {"trees and swapping": _TREES | _SWAPPING},
}


@cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(families.LOGITS))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("families")

    def of(name: str) -> Path:
        path = root / name
        return path if path.exists() else families.write(path, **RECORDED[name])

    return of


def load(path: Path) -> LoadedModel:
    return load_model(str(path))


def logits_of(loaded: LoadedModel, operations: Operations = XLA) -> np.ndarray:
    """Logits of the recorded positions."""
    config, tokens = loaded.config.for_length(len(golden()["tokens"])), golden()["tokens"]
    decoder = Decoder(config, device_weights(config, loaded.weights, "float32"), operations)
    return np.asarray(jax.jit(forward)(decoder, jnp.asarray(tokens)))[golden()["kept"]]


def test_every_family_is_recorded() -> None:
    recorded = {entry["config"]["model_type"] for entry in RECORDED.values()}
    others = {"mistral", "qwen2", "qwen3"}  # test_golden.py
    assert recorded | others == set(FAMILIES)


@pytest.mark.parametrize("name", RECORDED)
def test_logits(name: str, folder: Any) -> None:
    np.testing.assert_allclose(logits_of(load(folder(name))), golden()[name], atol=1e-4)


@pytest.mark.parametrize("name", [name for name in RECORDED if "moe" in name or name == "mixtral"])
def test_logits_with_the_gpu_kernel_for_experts(name: str, folder: Any) -> None:
    loaded = load(folder(name))
    assert loaded.config.experts is not None
    np.testing.assert_allclose(logits_of(loaded, GpuLayers(interpret=True).operations), golden()[name], atol=1e-4)


@pytest.mark.parametrize("name", GGUF)
def test_logits_of_a_gguf_file(name: str, folder: Any, tmp_path: Path) -> None:
    loaded = load(folder(name))
    more: dict[str, Any] = {"gemma3.attention.sliding_window_pattern": 3} if name == "gemma3" else {}
    path = family_gguf.write(tmp_path / "m.gguf", loaded, **more)
    np.testing.assert_allclose(logits_of(load(path)), golden()[name], atol=1e-4)


@pytest.mark.parametrize(("name", "kernels"), SERVED)
def test_the_step(name: str, kernels: str, folder: Any) -> None:
    """Prompts in chunks of 8 have the recorded log-probabilities; drafts and swapping change no token."""
    settings: dict[str, Any] = SIZES | dict(kernels=kernels)
    loaded, tokens = load(folder(name)), [int(t) for t in golden()["tokens"]]
    wanted = golden()[name].astype(np.float64)
    wanted -= np.log(np.exp(wanted).sum(-1, keepdims=True))
    prompts = [tokens, tokens[5:20], tokens[:3], tokens[10:38], tokens[7:9]]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=20, ignore_eos=True) for i, t in enumerate((0, 0, 1, 0, 0.7))
    ]
    with LLM(loaded, draft=[], **settings) as llm:
        out = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
        assert out.prompt_logprobs is not None
        for row, at in enumerate(golden()["kept"][:-1]):
            entry = out.prompt_logprobs[at + 1]
            assert entry is not None and entry.logprob == pytest.approx(wanted[row, tokens[at + 1]], abs=2e-4)
        alone = [tokens_of(llm.generate([p], [q])[0]) for p, q in zip(prompts, params, strict=True)]
    for way, more in WAYS[kernels].items():
        given: dict[str, Any] = settings | more
        with LLM(loaded, **given) as llm:
            assert [tokens_of(o) for o in llm.generate(prompts, params)] == alone, way
            stats = llm.engine.stats()
            assert stats.compilations_after_warmup == 0 and stats.draft_tokens > 0, way
            check_clean(llm)
