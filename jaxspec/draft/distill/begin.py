"""The drafter that a training run begins with: its vocabulary and its initial weights."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.draft.distill.config import DistillConfig
from jaxspec.draft.distill.data import Corpus
from jaxspec.errors import ModelLoadError
from jaxspec.models.decoder import head_of
from jaxspec.models.drafter import DraftDecoder, feature_width
from jaxspec.models.load import LoadedModel
from jaxspec.models.load.drafter_file import load_drafter
from jaxspec.models.load.weights import Weights


def vocabulary(data: Corpus, size: int, always: tuple[int, ...], total: int) -> np.ndarray:
    """The draft vocabulary `[V']` int32, ascending: the `size` most frequent tokens of the training answers, with
    `always` included.

    `total` is the size of the target's vocabulary, all of which is used if `size` is not smaller.
    """
    counts = np.zeros(total, np.int64)
    for row, start, length, held in zip(data.tokens, data.start, data.length, data.held_out, strict=True):
        if not held:
            counts += np.bincount(row[start:length], minlength=total)
    counts[list(always)] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[: min(size, total)]).astype(np.int32)


def successors(data: Corpus, total: int) -> np.ndarray:
    """For each token `[total]` int32, what follows it most often in the training answers: the simplest drafter. A token
    that they do not have is followed by their most frequent one."""
    pairs = np.concatenate([
        np.stack([row[max(start, 1) - 1 : length - 1], row[max(start, 1) : length]], 1)
        for row, start, length, held in zip(data.tokens, data.start, data.length, data.held_out, strict=True)
        if not held
    ])  # fmt: skip
    found = np.full(total, np.bincount(pairs[:, 1]).argmax(), np.int32)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    order = np.lexsort((counts, distinct[:, 0]))  # by token, its most frequent successor last
    last = order[np.flatnonzero(np.diff(distinct[order, 0], append=-1))]
    found[distinct[last, 0]] = distinct[last, 1]
    return found


def begin(config: DistillConfig, target: LoadedModel, vocab: np.ndarray) -> DraftDecoder:
    """The initial drafter: layers of the target or of a trained drafter, and the target's head cut to `vocab [V']`.

    A conditioned drafter's condition starts as the target's final hidden state, and its fuse matrix as embedding plus
    0.1 * condition, plus noise. Raises `ConfigError` if `begin` is not a drafter file or has another architecture.
    """
    c, k = target.config.for_length(config.longest), min(config.layers, target.config.num_layers)
    if c.norm == "layer":
        raise ConfigError("target: drafters are trained for models with norms by root mean square only")
    first = 0 if config.begin == "first" else c.num_layers - k
    shared = [name for name in ("embed", "positions", "norm", "norm_bias") if name in target.weights]
    w: dict[str, np.ndarray] = {"vocab": vocab, **{name: target.weights[name] for name in shared}}
    w["head"] = head_of(c, target.weights)[:, vocab]
    for i in range(k):
        prefix = f"layers.{first + i}."
        w |= {f"layers.{i}.{n.removeprefix(prefix)}": target.weights[n] for n in target.weights if n.startswith(prefix)}
    if config.conditioned:
        noise = np.random.default_rng(config.seed).normal(size=(2 * c.hidden_size, c.hidden_size))
        w["fuse"] = (noise * 0.5 / np.sqrt(2 * c.hidden_size)).astype(np.float32)
        w["fuse"] += np.concatenate([np.eye(c.hidden_size), 0.1 * np.eye(c.hidden_size)]).astype(np.float32)
        w["mix"] = np.zeros((feature_width(c), c.hidden_size), np.float32)
        w["mix"][-c.hidden_size :] = np.diag(w["norm"])  # the last layer's output, as the target's own norm scales it
    if config.begin.endswith(".safetensors"):
        w |= _trained_weights(Path(config.begin), config, target, k)
    # Training is in float32, whatever the target is stored in.
    return DraftDecoder(c.alike(k), {n: jnp.asarray(v, None if n == "vocab" else jnp.float32) for n, v in w.items()})


def _trained_weights(path: Path, config: DistillConfig, target: LoadedModel, layers: int) -> Weights:
    """The weights of a trained drafter for one of `layers` layers. Added layers output zeros."""
    try:
        drafter, weights = load_drafter(path, target.config, target.weights)
    except ModelLoadError as error:
        raise ConfigError(f"begin: {error}") from None
    if drafter.num_layers > layers or ("mix" in weights) != config.conditioned:
        kind = "conditioned" if "mix" in weights else "plain"
        wanted = "conditioned" if config.conditioned else "plain"
        raise ConfigError(
            f"begin: {path} is a {kind} drafter of {drafter.num_layers} layers, which cannot start a {wanted} one of "
            f"{layers}"
        )
    w = {name: weights[name] for name in weights if name not in ("embed", "positions", "head", "vocab")}
    for i in range(drafter.num_layers, layers):
        for part in ("o", "o_bias", "down", "down_bias", "experts_down"):
            if (name := f"layers.0.{part}") in weights:
                w[f"layers.{i}.{part}"] = np.zeros_like(weights[name])
    return w
