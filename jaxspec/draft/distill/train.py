"""Training a drafter on the target's own text: its distributions as soft targets, and its features to come near to.

The loss is EAGLE's (Li et al. 2024, §4.2: distributions, and a regression of the features) with the squared error in
place of smooth L1. Later passes read the drafter's own features in place of the target's, as it will have to when it
drafts: HASS's alignment over several steps (Zhang et al. 2024), here without the mixed attention keys.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxspec.config import ConfigError
from jaxspec.draft.distill import curve
from jaxspec.draft.distill.config import DistillConfig
from jaxspec.draft.distill.data import Corpus, padded
from jaxspec.draft.distill.origin import origin
from jaxspec.errors import ModelLoadError
from jaxspec.models.drafter import DraftDecoder, draft_forward
from jaxspec.models.llama import head_of
from jaxspec.models.load import LoadedModel
from jaxspec.models.load.drafter_file import load_drafter, save_drafter
from jaxspec.models.load.weights import Weights
from jaxspec.progress import progress
from jaxspec.train_predictor.checkpoints import Checkpoints

#: Draft tokens in a row that the held-out evaluation looks at.
DEPTH = 5


class Batch(NamedTuple):
    """Rows: tokens `[B, L]` int32, the target's features `[B, L, hidden]` float32, use `[B, L]` bool: where the next
    token is an answer's, in rows that are not there only to fill the batch."""

    tokens: jax.Array
    features: jax.Array
    use: jax.Array


def vocabulary(data: Corpus, size: int, always: tuple[int, ...], total: int) -> np.ndarray:
    """The `size` tokens `[V']` int32 that the answers to train on hold most often, ascending, `always` among them.

    `total` is the target's vocabulary; all of it if `size` is no less.
    """
    counts = np.zeros(total, np.int64)
    for row, start, length, held in zip(data.tokens, data.start, data.length, data.held_out, strict=True):
        if not held:
            counts += np.bincount(row[start:length], minlength=total)
    counts[list(always)] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[: min(size, total)]).astype(np.int32)


def begin(config: DistillConfig, target: LoadedModel, vocab: np.ndarray) -> DraftDecoder:
    """A drafter of the target's own layers or of one trained before; its head is the target's, cut to `vocab [V']`.

    The fusing map of a conditioned one begins as the token's embedding, a tenth of the feature, and noise. Raises
    `ConfigError` if the drafter to begin with is none, or of another kind.
    """
    c, k = target.config, min(config.layers, target.config.num_layers)
    first = 0 if config.begin == "first" else c.num_layers - k
    w = {"embed": target.weights["embed"], "norm": target.weights["norm"], "vocab": vocab}
    w["head"] = head_of(c, target.weights)[:, vocab]
    for i in range(k):
        at = f"layers.{first + i}."
        w |= {f"layers.{i}.{n.removeprefix(at)}": v for n, v in target.weights.items() if n.startswith(at)}
    if config.conditioned:
        noise = np.random.default_rng(config.seed).normal(size=(2 * c.hidden_size, c.hidden_size))
        w["fuse"] = (noise * 0.5 / np.sqrt(2 * c.hidden_size)).astype(np.float32)
        w["fuse"] += np.concatenate([np.eye(c.hidden_size), 0.1 * np.eye(c.hidden_size)]).astype(np.float32)
    if config.begin.endswith(".safetensors"):
        w |= _learned_before(Path(config.begin), config, target, k)
    config_k = replace(c, num_layers=k, windowed_layers=())
    return DraftDecoder(config_k, {n: jnp.asarray(v) for n, v in w.items()})


def _learned_before(path: Path, config: DistillConfig, target: LoadedModel, layers: int) -> Weights:
    """What a trained drafter has for one of `layers` layers, the added ones silenced."""
    try:
        before, own = load_drafter(path, target.config, dict(target.weights))
    except ModelLoadError as error:
        raise ConfigError(f"begin: {error}") from None
    if before.num_layers > layers or ("fuse" in own) != config.conditioned:
        kind = "conditioned" if "fuse" in own else "plain"
        raise ConfigError(f"begin: {path} is a {kind} drafter of {before.num_layers} layers, not what is to be trained")
    w = {name: value for name, value in own.items() if name not in ("embed", "head", "vocab")}
    for i in range(before.num_layers, layers):
        for part in ("o", "down"):
            w[f"layers.{i}.{part}"] = np.zeros_like(own[f"layers.0.{part}"])
    return w


def trained(path: tuple[Any, ...], _: Any) -> bool:
    """The layers, the fusing map and the norm learn; embedding and head stay the target's."""
    return path[0] in ("layers", "fuse", "norm")


def loss_and_hits(
    model: DraftDecoder, batch: Batch, passes: int, regression: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """-> mean loss of the passes, (share of positions where drafter and target choose the same, loss) `[passes]` each.

    Both choose from the trimmed vocabulary. A plain drafter, which reads no features, makes one pass.
    """
    losses, hits = [], []
    features = batch.features
    head = jax.lax.stop_gradient(model.head[...])
    teacher = batch.features @ head
    wanted = jax.nn.softmax(teacher)
    best = jnp.argmax(teacher, -1)
    count = jnp.maximum(jnp.sum(batch.use), 1)
    for _ in range(passes if model.conditioned else 1):
        own = jax.vmap(lambda t, f: draft_forward(model, t, f))(batch.tokens, features)
        logits = own @ head
        cross = -jnp.sum(wanted * jax.nn.log_softmax(logits), -1)
        error = jnp.mean((own - batch.features) ** 2, -1) / jnp.mean(batch.features**2)
        losses.append(jnp.sum((cross + regression * error) * batch.use) / count)
        hits.append(jnp.sum((jnp.argmax(logits, -1) == best) * batch.use) / count)
        features = jax.lax.stop_gradient(own)
    each = jnp.stack(losses)
    return jnp.mean(each), (jnp.stack(hits), each)


class Trainer:
    """State of a run; `run` goes on from the last checkpoint in the work folder."""

    def __init__(self, config: DistillConfig, target: LoadedModel, data: Corpus):
        self.config, self.target, self.data = config, target, data
        c = target.config
        self.vocab = vocabulary(data, config.vocabulary, c.eos_token_ids, c.vocab_size)
        model = begin(config, target, self.vocab)
        self.graph, learn, self.rest = nnx.split(model, trained, ...)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, config.learning_rate, config.warmup, max(config.steps, config.warmup + 1), config.learning_rate * 0.05
        )
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))
        self.state: dict[str, Any] = {"learn": learn, "optimizer": self.optimizer.init(learn)}
        #: Steps done, and tokens trained on in them.
        self.step, self.tokens = 0, 0
        self.evaluations: list[curve.Evaluation] = []
        self._update = jax.jit(self._make_update(), donate_argnums=0)
        self._evaluate = jax.jit(self._make_evaluate())

    @property
    def model(self) -> DraftDecoder:
        """The drafter as it is now."""
        return nnx.merge(self.graph, self.state["learn"], self.rest)

    def _make_update(self) -> Any:
        def update(state: dict[str, Any], rest: Any, batch: Batch) -> tuple[dict[str, Any], Any]:
            """-> state after a step, (hits, losses) `[passes]` each before it."""

            def loss(learn: Any) -> Any:
                model = nnx.merge(self.graph, learn, rest)
                return loss_and_hits(model, batch, self.config.passes, self.config.regression)

            (_, (hits, losses)), grads = jax.value_and_grad(loss, has_aux=True)(state["learn"])
            changes, optimizer = self.optimizer.update(grads, state["optimizer"], state["learn"])
            return {"learn": optax.apply_updates(state["learn"], changes), "optimizer": optimizer}, (hits, losses)

        return update

    def _make_evaluate(self) -> Any:
        vocab = jnp.asarray(self.vocab)

        def evaluate(learn: Any, rest: Any, head: jax.Array, batch: Batch) -> jax.Array:
            """Hits `[DEPTH, B, L]` bool: after j passes over own features, is the first choice the target's, made with
            its whole `head [hidden, vocab]`?"""
            model = nnx.merge(self.graph, learn, rest)
            # Row by row: logits over the whole vocabulary for all of them would be the largest array by far.
            best = jax.lax.map(lambda f: jnp.argmax(f @ head, -1), batch.features)
            features, hits = batch.features, []
            for _ in range(DEPTH):
                own = jax.vmap(lambda t, f: draft_forward(model, t, f))(batch.tokens, features)
                hits.append(vocab[jnp.argmax(own @ model.head[...], -1)] == best)
                features = own if model.conditioned else features
            return jnp.stack(hits)

        return evaluate

    def groups(self) -> Iterator[np.ndarray]:
        """Row numbers of the training batches for ever, in an order of each epoch's own; rows of like length lie
        together."""
        rows = np.flatnonzero(~self.data.held_out)
        epoch = 0
        while True:
            rng = np.random.default_rng((self.config.seed, epoch))
            order = rows[np.argsort(self.data.length[rows] + rng.integers(0, 48, len(rows)))]
            groups = [order[i : i + self.config.batch] for i in range(0, len(order), self.config.batch)]
            for i in rng.permutation(len(groups)):
                yield groups[i]
            epoch += 1

    def batch(self, rows: np.ndarray, prompts: bool = False) -> Batch:
        """A full batch: some of `rows` again, unused, where there are too few. Tokens of `prompts` count or don't."""
        d = self.data
        filled = np.resize(rows, self.config.batch)
        width = min(padded(int(d.length[filled].max())), d.tokens.shape[1])
        place = np.arange(width)
        use = (place >= (0 if prompts else d.start[filled, None] - 1)) & (place < d.length[filled, None] - 1)
        use[len(rows) :] = False
        features = np.stack([np.asarray(d.features[r, :width], np.float32) for r in filled])
        return Batch(jnp.asarray(d.tokens[filled, :width]), jnp.asarray(features), jnp.asarray(use))

    def run(self, folder: Path) -> None:
        """Train to the configured number of steps, with checkpoints, the drafter and the learning curve in `folder`.

        Raises `ConfigError` if the checkpoints there are of another run, or damaged.
        """
        with Checkpoints(folder, self._identity()) as checkpoints:
            self._restore(checkpoints)
            groups = islice(self.groups(), self.step, None)  # a run taken up again does not begin its epoch anew
            begun = time.monotonic()
            with progress("training steps", self.config.steps, self.step) as advance:
                while self.step < self.config.steps:
                    batch = self.batch(next(groups), self.config.prompts)
                    self.state, (hits, losses) = self._update(self.state, self.rest, batch)
                    self.step, self.tokens = self.step + 1, self.tokens + int(batch.use.sum())
                    advance()
                    if self.step % self.config.every == 0 or self.step == self.config.steps:
                        self.evaluations.append(self.evaluate())
                        line = {"step": self.step, "seconds": round(time.monotonic() - begun), **self.evaluations[-1]}
                        line |= {"train_hits": [round(float(h), 3) for h in hits], "loss": round(float(losses[0]), 3)}
                        print(json.dumps(line), flush=True)
                        self._keep(checkpoints, folder)
        curve.write(self.evaluations, folder, folder.name)  # again, for a folder that was finished without one

    def _identity(self) -> dict[str, Any]:
        """What a run must have in common with the checkpoints that it goes on from. The learning rate follows from all
        the steps that are to come, so their number belongs to it."""
        settings = self.config.model_dump(exclude={"data", "target", "work", "out", "every"})
        return {"target": str(origin(self.target)), "answers": self.data.digest(), **settings}

    def _restore(self, checkpoints: Checkpoints) -> None:
        """Go back to the last checkpoint, if there is one."""
        if (log := checkpoints.log()) is None:
            return
        self.state = checkpoints.restore(self.state)
        self.step, self.tokens, self.evaluations = log["step"], log["tokens"], log["curve"]

    def _keep(self, checkpoints: Checkpoints, folder: Path) -> None:
        """A checkpoint, and beside it what can be looked at or used already."""
        checkpoints.save(self.step, self.state, {"step": self.step, "tokens": self.tokens, "curve": self.evaluations})
        self.export(folder / "drafter.safetensors")
        curve.write(self.evaluations, folder, folder.name)

    def evaluate(self, rows: int = 32) -> curve.Evaluation:
        """Held-out rows: hit rate at each depth, and the mean length (bonus included) a greedy chain would be accepted
        at. An estimate: attention at depth j reads keys of pass j, the engine's reads those of accepted tokens."""
        held = np.flatnonzero(self.data.held_out)[:rows]
        hits, accepted, count = np.zeros(DEPTH), 0.0, 0
        for i in range(0, len(held), self.config.batch):
            batch = self.batch(held[i : i + self.config.batch])
            got = np.asarray(self._evaluate(self.state["learn"], self.rest, self._full_head, batch))
            use = np.asarray(batch.use)
            hits += (got & use).sum((1, 2))
            alive = use.copy()
            for j in range(DEPTH):  # depth j speaks of the position j further on
                shifted = np.zeros_like(alive)
                shifted[:, : use.shape[1] - j] = (got[j] & use)[:, j:]
                alive &= shifted
                accepted += alive.sum()
            count += int(use.sum())
        rates = [round(float(h), 4) for h in hits / max(count, 1)]
        return {"tokens": self.tokens, "hits": rates, "accepted_length": round(1 + accepted / max(count, 1), 4)}

    @cached_property
    def _full_head(self) -> jax.Array:
        """The target's `[hidden, vocab]`."""
        return jnp.asarray(head_of(self.target.config, self.target.weights))

    def export(self, path: Path) -> None:
        """The drafter as `jaxspec.models.load.drafter_file` reads it."""
        save_drafter(self.model, self.target.name, path)
