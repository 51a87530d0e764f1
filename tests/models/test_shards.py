"""Every head, column and row is on some device, and the devices' parts add up to the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import tiny
from jaxspec.models.config import DecoderConfig, Experts
from jaxspec.models.load.parts import weight_shapes
from jaxspec.models.shards import Shards, split_axis


@st.composite
def models(draw: Any) -> DecoderConfig:
    kv, group = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    return tiny.config(
        num_heads=kv * group, num_kv_heads=kv, head_dim=2, hidden_size=draw(st.integers(3, 12)),
        intermediate_size=draw(st.integers(2, 17)), gated=draw(st.booleans()), qkv_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()), vocab_size=draw(st.integers(5, 23)), tie_embeddings=False,
        experts=draw(st.sampled_from([None, Experts(3, 2, 5), Experts(3, 2, 5, shared_width=7)])),
    )  # fmt: skip


@given(models(), st.integers(1, 8))
def test_each_query_head_is_with_its_kv_head(c: DecoderConfig, devices: int) -> None:
    shards = Shards(c, devices)
    kv, queries = shards.heads
    local, group = shards.local, c.num_heads // c.num_kv_heads
    assert kv.shape == (devices, local.num_kv_heads) and queries.shape == (devices, local.num_heads)
    assert sorted(queries[queries >= 0]) == list(range(c.num_heads))
    of_slot = queries.reshape(*kv.shape, -1)
    assert np.all((of_slot < 0) | (of_slot // group == kv[..., None]))
    assert local.num_kv_heads == -(-c.num_kv_heads // devices), "no device has more KV than it must"
    for heads in kv:
        found = heads[heads >= 0]
        assert len({*found}) == len(found), "no device has a KV head twice"
    if devices % c.num_kv_heads == 0 and group % (devices // c.num_kv_heads) == 0:
        assert local.num_heads * devices == c.num_heads, "nothing is idle where heads divide evenly"


@given(models(), st.integers(1, 6), st.integers(0, 100))
def test_parts_add_up(c: DecoderConfig, devices: int, seed: int) -> None:
    """The MLP and a linear "attention" in which a query head's output is its query times its key times its value."""
    shards, random = Shards(c, devices), np.random.default_rng(seed)
    weights = {name: random.normal(size=shape) for name, shape in weight_shapes(c).items()}
    parts = [_part(shards, weights, device) for device in range(devices)]
    for name, shape in weight_shapes(c).items():
        assert parts[0][name].shape == shards.local_shape(name, shape)
    x = random.normal(size=c.hidden_size)
    sums = [_attention(shards.local, part, x) for part in parts]
    np.testing.assert_allclose(sum(sums), _attention(c, weights, x), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(sum(_mlp(shards.local, part, x) for part in parts), _mlp(c, weights, x), atol=1e-9)
    logits = np.concatenate([x @ part["head"] for part in parts])
    np.testing.assert_allclose(logits[: c.vocab_size], x @ weights["head"], atol=1e-12)
    embedded = np.concatenate([part["embed"][3] for part in parts])
    np.testing.assert_array_equal(embedded[: c.hidden_size], weights["embed"][3])


def test_a_norm_over_all_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="llama models normalise queries over all heads"):
        Shards(tiny.config(qk_norm="all"), 2)


def _part(shards: Shards, weights: dict[str, np.ndarray], device: int) -> dict[str, np.ndarray]:
    """One device's part, taken from the arranged weights as a mesh takes it."""
    out = {}
    for name, weight in weights.items():
        arranged, axis = shards.arrange(name, weight), split_axis(name)
        out[name] = arranged if axis is None else np.split(arranged, shards.devices, axis)[device]
    return out


def _attention(c: DecoderConfig, weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    h = x @ weights["layers.0.qkv"] + weights.get("layers.0.qkv_bias", 0)
    q, k, v = np.split(h, [c.q_size, c.q_size + c.kv_size])
    group = c.num_heads // c.num_kv_heads
    per_head = [part.reshape(c.num_kv_heads, c.head_dim).repeat(group, 0) for part in (k, v)]
    return (q.reshape(c.num_heads, c.head_dim) * per_head[0] * per_head[1]).reshape(-1) @ weights["layers.0.o"]


def _mlp(c: DecoderConfig, weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    def one(gate_up: np.ndarray, down: np.ndarray, gated: bool, bias: Any = 0) -> np.ndarray:
        h = np.maximum(x @ gate_up + bias, 0)
        return (np.prod(np.split(h, 2), 0) if gated else h) @ down

    w = {name.removeprefix("layers.0."): weight for name, weight in weights.items()}
    if c.experts is None:
        return one(w["gate_up"], w["down"], c.gated, w.get("gate_up_bias", 0))
    experts = zip(w["experts_gate_up"], w["experts_down"], strict=True)
    total = np.sum([one(gate_up, down, True) for gate_up, down in experts], 0)
    return total + one(w["shared_gate_up"], w["shared_down"], True) if c.experts.shared_width else total
