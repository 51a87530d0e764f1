"""What a step has to read and compute at least, and the time that takes at the measured rates (its roofline)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxspec.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes moved between memory and multiprocessors, and floating-point operations, without any padding."""

    bytes: int
    flops: int


def layer_parameters(config: DecoderConfig) -> int:
    """Parameters of all layers' matrices."""
    c = config
    each = c.hidden_size * (2 * c.q_size + 2 * c.kv_size + 3 * c.intermediate_size)
    return c.num_layers * each


def head_parameters(config: DecoderConfig) -> int:
    return config.hidden_size * config.vocab_size


def weight_bytes(config: DecoderConfig, itemsize: int) -> int:
    """Bytes of the weights that every step reads: the layers' matrices and the head; of the embedding only some rows,
    and norms are small."""
    return (layer_parameters(config) + head_parameters(config)) * itemsize


def position_bytes(config: DecoderConfig, itemsize: int) -> int:
    """Bytes of one position's keys and values in all layers."""
    return 2 * config.num_layers * config.kv_size * itemsize


def step(config: DecoderConfig, itemsize: int, committed: int, depths: Iterable[Iterable[int]], rows: int) -> Cost:
    """The cost of a step of trees over `committed` positions each. depths: of each tree's nodes, the root's is 0; rows:
    logit rows of the step."""
    trees = [list(each) for each in depths]
    nodes = sum(map(len, trees))
    keys = sum(committed + depth + 1 for tree in trees for depth in tree)  # that a node attends to
    moved = weight_bytes(config, itemsize) + (len(trees) * committed + nodes) * position_bytes(config, itemsize)
    products = 2 * (nodes * layer_parameters(config) + rows * head_parameters(config))
    return Cost(moved, products + 4 * keys * config.q_size * config.num_layers)


def roofline_ms(cost: Cost, bytes_per_s: float | None, flops_per_s: float | None) -> float | None:
    """Milliseconds that `cost` takes at least; None while a rate is not measured."""
    if not bytes_per_s or not flops_per_s:
        return None
    return 1e3 * max(cost.bytes / bytes_per_s, cost.flops / flops_per_s)


def bound(cost: Cost, bytes_per_s: float | None, flops_per_s: float | None) -> str | None:
    """What limits a step of this cost: "memory" or "compute"; None while a rate is not measured."""
    if not bytes_per_s or not flops_per_s:
        return None
    return "memory" if cost.bytes / bytes_per_s >= cost.flops / flops_per_s else "compute"
