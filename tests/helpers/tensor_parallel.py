"""`python -m helpers.tensor_parallel` on four devices: models split over several of them write what they write on one.

A process of its own, because the number of devices is fixed when JAX starts.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from helpers import families, tiny
from helpers.fakes import ByteTokenizer, as_tokenizer
from helpers.generation import check_clean, params, prompts, tokens_of
from helpers.switching import start
from jaxspec import LLM
from jaxspec.models.config import DecoderConfig
from jaxspec.models.decoder import Decoder, device_weights, forward
from jaxspec.models.load import LoadedModel, load_model
from jaxspec.step.tensor_parallel import SHARDED, TensorParallel
from jaxspec.step.xla import XlaLayers

SIZES: dict[str, Any] = dict(
    page_size=16, max_num_seqs=4, token_buckets=[4, 32], max_num_batched_tokens=32, max_model_len=72,
    compilation_cache_dir="", kernels="xla",
)  # fmt: skip
#: Room for fewer requests than run: pages move to the host and back.
TIGHT: dict[str, Any] = dict(order="las", memory="swap", kv_cache_tokens=160)


def logits_of_families() -> None:
    """The recorded logits of every family, over two, three or four devices."""
    golden = np.load(families.LOGITS)
    tokens, kept = golden["tokens"], golden["kept"]
    for i, (name, entry) in enumerate(families.recorded().items()):
        with tempfile.TemporaryDirectory() as folder:
            loaded = load_model(str(families.write(Path(folder), **entry)))
            config = loaded.config.for_length(len(tokens))
            if config.qk_norm == "all":
                continue  # refused
            found = _logits(config, loaded, 2 + i % 3, tokens)[kept]
            assert np.abs(found - golden[name]).max() < 1e-4, name


def _logits(config: DecoderConfig, loaded: LoadedModel, count: int, tokens: np.ndarray) -> np.ndarray:
    parallel = TensorParallel(jax.devices()[:count])
    shards = parallel.shards(config)
    weights = device_weights(config, loaded.weights, "float32", put=partial(parallel.put, shards))
    names, arrays = list(weights), list(weights.values())

    def run(arrays: list[jax.Array], tokens: jax.Array) -> jax.Array:
        return forward(Decoder(shards.local, dict(zip(names, arrays, strict=True)), SHARDED), tokens)

    specs = [x.sharding.spec for x in arrays if isinstance(x.sharding, NamedSharding)]
    whole = PartitionSpec()
    program = jax.shard_map(
        run, mesh=parallel.mesh, in_specs=(specs, whole), out_specs=whole, check_vma=False
    )  # fmt: skip
    return np.asarray(jax.jit(program)(arrays, jnp.asarray(tokens)))


def uneven() -> LoadedModel:
    """Nine query and three KV heads, an MLP of 50 columns, 33 hidden: nothing divides by two or four."""
    c = tiny.config(num_heads=9, num_kv_heads=3, intermediate_size=50, hidden_size=33, vocab_size=259)
    return LoadedModel(c, tiny.weights(c), as_tokenizer(ByteTokenizer()), "uneven")


def requests_of_any_kind() -> None:
    """Random requests, greedy and sampled, with penalties, in crowds: the same tokens."""
    eagle = dict(draft=["conditioned", "ngram"], tree="fixed", draft_choice="single")
    ahead = dict(draft=["truncated:1"], tree="chain", async_scheduling=True, **TIGHT)
    parts = lambda count, **more: SIZES | dict(tensor_parallel_size=count) | more  # noqa: E731
    with ExitStack() as stack:
        enter = stack.enter_context
        groups: list[tuple[LLM, list[LLM]]] = [
            (
                enter(tiny.llm(**SIZES, draft=[])),
                [
                    enter(tiny.llm(**parts(2, draft=["truncated:1", "suffix"], tree="fixed"))),
                    enter(tiny.llm(**parts(4, draft=["truncated:1"], tree="chain", **TIGHT))),
                    enter(start(**parts(2, **eagle))),
                ],
            ),
            (
                enter(_llm(uneven(), draft=[])),
                [
                    enter(_llm(uneven(), **parts(2, draft=["truncated:1"], tree="chain"))),
                    enter(_llm(uneven(), **parts(4, draft=[], async_scheduling=True, **TIGHT))),
                    enter(_steady(uneven(), **parts(2, **ahead))),
                ],
            ),
            (
                enter(tiny.llm(**SIZES, draft=[], kv_cache_dtype="int8", kv_cache_tokens=512)),
                [enter(tiny.llm(**parts(2, draft=[], kv_cache_dtype="int8", kv_cache_tokens=512)))],
            ),
        ]

        @settings(deadline=None, max_examples=12, derandomize=True)
        @given(data=st.data())
        def same(data: Any) -> None:
            texts = [t[:40] for t in data.draw(st.lists(prompts, min_size=1, max_size=6))]
            each = [data.draw(params) for _ in texts]
            for one, several in groups:
                expected = [tokens_of(out) for out in one.generate(texts, each)]
                for llm in several:
                    assert [tokens_of(out) for out in llm.generate(texts, each)] == expected
                    check_clean(llm)

        for llm in (llm for one, several in groups for llm in (one, *several)):
            llm.engine.loop.model_runner.startup_done()  # the counter of compilations is the process's
        same()
        for _, several in groups:
            for llm in several:
                stats = llm.engine.stats()
                assert stats.compilations_after_warmup == 0, stats
                assert stats.draft_tokens > 0 or not llm.engine.config.draft
                if llm.engine.config.memory == "swap":
                    assert llm.engine.loop.host.offloaded > 0
        held = groups[0][1][0].engine.loop.model_runner.held()
        assert len(held) == 2 and len({*held.values()}) == 1, "both devices hold as much"


def _llm(model: LoadedModel, **settings: Any) -> LLM:
    return LLM(model, compile_in_background=False, **SIZES | settings)


def _steady(model: LoadedModel, **settings: Any) -> LLM:
    """With programs as GPUs have them (`jaxspec.step.addresses`)."""
    XlaLayers.steady = True
    try:
        return _llm(model, **settings)
    finally:
        XlaLayers.steady = False


def main() -> None:
    assert len(jax.devices()) == 4
    logits_of_families()
    requests_of_any_kind()
    print("same tokens")


if __name__ == "__main__":
    sys.exit(main())
