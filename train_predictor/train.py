"""Fine-tuning an encoder and a head to output lengths, in SSJF's two phases (§3.1): all weights, then the head only.

Each phase ends after its steps, or when the validation loss has not fallen for a while; what goes on, and what is
exported, are the weights with the lowest one. In the second phase the encoder's vectors are computed once and kept.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxspec.config import ConfigError
from jaxspec.models.length_head import LengthHead
from jaxspec.models.load.bert import LoadedEncoder
from jaxspec.predict.formulation import Formulation, class_bounds
from jaxspec.predict.proxy import ProxyPredictor
from jaxspec.progress import progress
from jaxspec.train_predictor import evaluate as curve
from jaxspec.train_predictor.checkpoints import Checkpoints
from jaxspec.train_predictor.config import PredictorConfig
from jaxspec.train_predictor.data import TEST, TRAIN, VALIDATION, Corpus, batches
from jaxspec.train_predictor.evaluate import Metrics, evaluate, rounded

#: Widths that rows are padded to: each compiles once.
WIDTHS = (32, 64, 96, 128, 192, 256, 384, 512)
#: Batches among whose rows those of like length are put together.
WINDOW = 32
#: Tokens whose activations are kept for the gradient at once: a larger batch goes through in pieces.
TOKENS = 4096
#: The encoder's parts that `freeze_embeddings` leaves as they are.
EMBEDDINGS = ("tokens", "positions", "types")


class Batch(NamedTuple):
    """Rows: ids `[B, T]` int32, tokens `[B]` int32: how many there are, length `[B]` float32, capped `[B]` bool,
    weights `[B]` float32: 0 for rows that only fill the batch."""

    ids: jax.Array
    tokens: jax.Array
    length: jax.Array
    capped: jax.Array
    weights: jax.Array

    @property
    def mask(self) -> jax.Array:
        return jnp.arange(self.ids.shape[-1]) < self.tokens[..., None]


class Progress(NamedTuple):
    """Where a run is: phase 1, 2, or 3 when it has ended; steps in that phase, and in all; the best validation loss;
    evaluations since it."""

    phase: int = 1
    step: int = 0
    steps: int = 0
    best: float = math.inf
    worse: int = 0


class Trainer:
    """State of a run; `run` goes on from the last checkpoint in the work folder.

    Raises `ConfigError` if the data are not fit to train on.
    """

    def __init__(self, config: PredictorConfig, loaded: LoadedEncoder, data: Corpus):
        self.config, self.loaded, self.data = config, loaded, data
        train = data.rows(TRAIN)
        self.bounds = np.asarray(class_bounds(data.length[train], config.classes))
        try:
            self.formulation = Formulation.fit(config.formulation, data.length[train], config.classes, config.scale)
        except ValueError as error:
            raise ConfigError(f"data: {error}") from None
        head = LengthHead(loaded.config.hidden, config.width, self.formulation.outputs, nnx.Rngs(config.seed))
        frozen = EMBEDDINGS if config.freeze_embeddings else ()
        self.encoder_graph, learn, self.rest = nnx.split(loaded.encoder, lambda path, _: path[0] not in frozen, ...)
        self.head_graph, head_state = nnx.split(head)
        weights = {"encoder": copied(learn), "head": head_state}
        self.optimizers = self._optimizers()
        self.state: dict[str, Any] = {**weights, "optimizer": self.optimizers[0].init(weights)}
        #: The weights with the lowest validation loss.
        self.best: dict[str, Any] = copied(weights)
        self.at = Progress()
        self.evaluations: list[curve.Evaluation] = []
        self._key = jax.random.key(config.seed)
        self._update = jax.jit(self._make_update(), donate_argnums=0)
        self._update_head = jax.jit(self._make_update_head(), donate_argnums=0)
        self._first = jax.jit(lambda learn, rest, b: self._encoder(learn, rest).first(b.ids, b.mask))
        self._read = jax.jit(lambda head, first: nnx.merge(self.head_graph, head)(first))

    def _encoder(self, learn: Any, rest: Any) -> Any:
        return nnx.merge(self.encoder_graph, learn, rest)

    def _optimizers(self) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
        """Of the first phase and of the second."""
        c = self.config

        def adam(rate: float, steps: int) -> optax.GradientTransformation:
            warmup = min(c.warmup, max(steps // 2, 1))
            schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, max(steps, warmup + 1), rate * 0.05)
            return optax.adamw(schedule, weight_decay=c.weight_decay)

        each: dict[Any, optax.GradientTransformation] = {
            "encoder": adam(c.learning_rate, c.steps),
            "head": adam(c.head_learning_rate, c.steps),
        }
        both = optax.multi_transform(each, {"encoder": "encoder", "head": "head"})
        clip = optax.clip_by_global_norm(1.0)
        return optax.chain(clip, both), optax.chain(clip, adam(c.head_learning_rate, c.head_steps))

    # Steps

    def _loss(self, head: Any, first: jax.Array, batch: Batch, key: jax.Array) -> jax.Array:
        """Of the vectors `first [B, H]`, some of their numbers left out."""
        if self.config.dropout:
            kept = jax.random.bernoulli(key, 1 - self.config.dropout, first.shape)
            first = jnp.where(kept, first / (1 - self.config.dropout), 0)
        raw = nnx.merge(self.head_graph, head)(first)
        return self.formulation.loss(raw, batch.length, batch.weights, batch.capped)

    def _make_update(self) -> Callable[..., Any]:
        def update(state: dict[str, Any], rest: Any, batch: Batch, step: jax.Array) -> tuple[dict[str, Any], jax.Array]:
            """-> state after a step, loss before it."""
            key = jax.random.fold_in(self._key, step)

            def loss(weights: Any, piece: Batch, key: jax.Array) -> jax.Array:
                first = self._encoder(weights["encoder"], rest).first(piece.ids, piece.mask)
                return self._loss(weights["head"], first, piece, key)

            def add(total: Any, piece: tuple[Batch, jax.Array]) -> tuple[Any, None]:
                share = jnp.sum(piece[0].weights) / jnp.sum(batch.weights)
                found = jax.value_and_grad(loss)(weights, *piece)
                return jax.tree.map(lambda t, v: t + share * v, total, found), None

            weights = {"encoder": state["encoder"], "head": state["head"]}
            count = pieces(*batch.ids.shape)
            if count == 1:
                value, grads = jax.value_and_grad(loss)(weights, batch, key)
            else:
                split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
                nothing = jax.tree.map(jnp.zeros_like, (jnp.float32(0), weights))
                (value, grads), _ = jax.lax.scan(add, nothing, (split, jax.random.split(key, count)))
            changes, optimizer = self.optimizers[0].update(grads, state["optimizer"], weights)
            return {**optax.apply_updates(weights, changes), "optimizer": optimizer}, value  # type: ignore[dict-item]

        return update

    def _make_update_head(self) -> Callable[..., Any]:
        def update(
            state: dict[str, Any], vectors: jax.Array, batch: Batch, rows: jax.Array, step: jax.Array
        ) -> tuple[dict[str, Any], jax.Array]:
            """The same for the head alone; `vectors [N, H]`, of which `rows [B]` are the batch's."""
            key = jax.random.fold_in(self._key, step)
            value, grads = jax.value_and_grad(self._loss)(state["head"], vectors[rows], batch, key)
            changes, optimizer = self.optimizers[1].update(grads, state["optimizer"], state["head"])
            return {"head": optax.apply_updates(state["head"], changes), "optimizer": optimizer}, value

        return update

    # Batches

    def batch(self, rows: np.ndarray, read: bool = True) -> Batch:
        """A full batch of rows' numbers: some again, without weight, where there are too few. Without ids unless it
        is to be `read`."""
        d, size = self.data, self.config.batch
        filled = np.resize(rows, size)
        tokens = np.asarray([len(d.ids[r]) for r in filled], np.int32)
        ids = np.zeros((size, width_of(int(tokens.max())) if read else 0), np.int32)
        for i, r in enumerate(filled if read else ()):
            ids[i, : tokens[i]] = d.ids[r]
        weights = (np.arange(size) < len(rows)).astype(np.float32)
        arrays = (ids, tokens, d.length[filled].astype(np.float32), d.capped[filled], weights)
        return Batch(*map(jnp.asarray, arrays))

    def epochs(self, phase: int) -> Iterator[np.ndarray]:
        """Row numbers of the training batches for ever."""
        rows, widths, size = self.data.rows(TRAIN), [len(ids) for ids in self.data.ids], self.config.batch
        epoch = 0
        while True:
            rng = np.random.default_rng((self.config.seed, phase, epoch))
            # Among vectors there are no lengths to sort by.
            yield from batches(rows, widths, size, WINDOW * size if phase == 1 else size, rng)
            epoch += 1

    def vectors(self, rows: np.ndarray, weights: dict[str, Any]) -> np.ndarray:
        """The encoder's vectors `[rows, H]` float32, with `weights`."""
        out = np.zeros((len(rows), self.loaded.config.hidden), np.float32)
        order = np.argsort([len(self.data.ids[r]) for r in rows], kind="stable")
        for i in range(0, len(rows), self.config.batch):
            part = order[i : i + self.config.batch]
            out[part] = np.asarray(self._first(weights["encoder"], self.rest, self.batch(rows[part])))[: len(part)]
        return out

    # A run

    def run(self, folder: Path) -> Metrics:
        """Train to the end of both phases, with checkpoints and the curves in `folder`; -> how good the result is on
        the test part, which is written to `report.json` too.

        Raises `ConfigError` if the checkpoints there are of another run, or damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with Checkpoints(folder, self._identity()) as checkpoints:
            self._restore(checkpoints)
            if self.at.phase == 1:
                self._phase(checkpoints, folder, self.config.steps, self._steps_of_all())
            if self.at.phase == 2:
                self._phase(checkpoints, folder, self.config.head_steps, self._steps_of_head())
        curve.write(self.evaluations, folder, folder.name)
        found = self.report()
        (folder / "report.json").write_text(json.dumps(rounded(found), indent=1) + "\n")
        return found

    def _phase(
        self, checkpoints: Checkpoints, folder: Path, steps: int, step: tuple[Callable[[np.ndarray], Any], Any]
    ) -> None:
        """Steps of the phase that is on, up to its end; then the next one begins from the best weights."""
        make, judge = step
        groups = islice(self.epochs(self.at.phase), self.at.step, None)  # not the epoch anew, if taken up again
        begun, losses = time.monotonic(), []
        if not self.evaluations:
            self._evaluated(judge(), None, begun)
        with progress(f"phase {self.at.phase}, steps", steps, self.at.step) as advance:
            while self.at.step < steps and self.at.worse < self.config.patience:
                losses.append(make(next(groups)))
                self.at = self.at._replace(step=self.at.step + 1, steps=self.at.steps + 1)
                advance()
                if self.at.step % self.config.every == 0 or self.at.step == steps:
                    mean = float(np.mean([float(loss) for loss in losses]))
                    losses = []
                    self._evaluated(judge(), mean, begun)
                    self._keep(checkpoints, folder)
        self._next_phase()
        self._keep(checkpoints, folder)

    def _steps_of_all(self) -> tuple[Callable[[np.ndarray], Any], Callable[[], np.ndarray]]:
        """A step on a group of rows, and the raw outputs for the validation part."""
        rows = self.data.rows(VALIDATION)

        def step(group: np.ndarray) -> jax.Array:
            self.state, loss = self._update(self.state, self.rest, self.batch(group), np.int32(self.at.steps))
            return loss

        return step, lambda: np.asarray(self._read(self.state["head"], self.vectors(rows, self.state)))

    def _steps_of_head(self) -> tuple[Callable[[np.ndarray], Any], Callable[[], np.ndarray]]:
        rows = self.data.rows(TRAIN)
        vectors = jnp.asarray(self.vectors(rows, self.best))
        held = jnp.asarray(self.vectors(self.data.rows(VALIDATION), self.best))
        place = np.full(len(self.data), -1, np.int32)
        place[rows] = np.arange(len(rows))

        def step(group: np.ndarray) -> jax.Array:
            own = place[np.resize(group, self.config.batch)]
            batch = self.batch(group, read=False)
            self.state, loss = self._update_head(self.state, vectors, batch, own, np.int32(self.at.steps))
            return loss

        return step, lambda: np.asarray(self._read(self.state["head"], held))

    def _evaluated(self, raw: np.ndarray, train: float | None, begun: float) -> None:
        """Take note of the validation part's raw outputs `[rows, outputs]`. Raises `ConfigError` if they are no
        numbers."""
        rows = self.data.rows(VALIDATION)
        length, capped = self.data.length[rows], self.data.capped[rows]
        weights = jnp.ones(len(rows))
        loss = float(
            self.formulation.loss(jnp.asarray(raw), jnp.asarray(length, jnp.float32), weights, jnp.asarray(capped))
        )
        if not math.isfinite(loss):
            raise ConfigError(f"learning_rate: at step {self.at.steps} the loss is {loss}; set a lower rate")
        found = evaluate(self.formulation.lengths(raw), length, capped, self.bounds)
        numbers = rounded({"train": train, "validation": loss, "mae": found["mae"], "tau": found["tau"]})
        self.evaluations.append(curve.Evaluation(step=self.at.steps, phase=self.at.phase, **numbers))
        print(json.dumps({**self.evaluations[-1], "seconds": round(time.monotonic() - begun)}), flush=True)
        if loss < self.at.best:
            self.at = self.at._replace(best=loss, worse=0)
            self.best |= {name: copied(self.state[name]) for name in self.best if name in self.state}
        else:
            self.at = self.at._replace(worse=self.at.worse + 1)

    def _next_phase(self) -> None:
        self.at = self.at._replace(phase=self.at.phase + 1, step=0, worse=0)
        head = copied(self.best["head"])
        self.state = {"head": head, "optimizer": self.optimizers[1].init(head)}

    # Checkpoints

    def _identity(self) -> dict[str, Any]:
        """What a run must have in common with the checkpoints that it goes on from."""
        unimportant = {"data", "target", "cap", "limit", "work", "out"}
        settings = self.config.model_dump(exclude=unimportant)
        return {**settings, "layers": self.loaded.config.layers, "rows and lengths": self.data.digest()}

    def _restore(self, checkpoints: Checkpoints) -> None:
        if (log := checkpoints.log()) is None:
            return
        at = Progress(*log["at"])
        if at.phase > 1:
            self._next_phase()
        restored = checkpoints.restore({"state": self.state, "best": self.best})
        self.state, self.best, self.at, self.evaluations = restored["state"], restored["best"], at, log["curve"]

    def _keep(self, checkpoints: Checkpoints, folder: Path) -> None:
        log = {"at": list(self.at), "curve": self.evaluations}
        checkpoints.save(self.at.steps + self.at.phase - 1, {"state": self.state, "best": self.best}, log)
        curve.write(self.evaluations, folder, folder.name)

    # The result

    def raw(self, rows: np.ndarray) -> np.ndarray:
        """Raw outputs `[rows, outputs]` of the best weights."""
        return np.asarray(self._read(self.best["head"], self.vectors(rows, self.best)))

    def calibrated(self) -> Formulation:
        """The formulation, told what its scores mean if it deals in scores."""
        return self.formulation.calibrated(self.raw(self.data.rows(TRAIN)))

    def report(self) -> Metrics:
        """Of the best weights, on the test part."""
        rows = self.data.rows(TEST)
        predicted = self.calibrated().lengths(self.raw(rows))
        return evaluate(predicted, self.data.length[rows], self.data.capped[rows], self.bounds)

    def predictor(self, name: str) -> ProxyPredictor:
        """With the best weights."""
        encoder = self._encoder(self.best["encoder"], self.rest)
        head = nnx.merge(self.head_graph, self.best["head"])
        about = {"target": self.config.target, "encoder": self.config.encoder, "data": str(self.data)}
        return ProxyPredictor(encoder, head, self.calibrated(), self.loaded.tokenizer, name, about, self.config.longest)


def copied(tree: Any) -> Any:
    """Arrays that a step may take for its own, or that outlive one which takes the originals."""
    return jax.tree.map(jnp.copy, tree)


def width_of(tokens: int) -> int:
    """What rows of up to so many tokens are padded to."""
    return next((width for width in WIDTHS if tokens <= width), -(-tokens // 128) * 128)


def pieces(rows: int, width: int) -> int:
    """How many equal parts a batch is cut into, of two rows at least."""
    fitting = (n for n in range(1, rows // 2 + 1) if rows % n == 0 and rows // n * width <= TOKENS)
    return next(fitting, max(n for n in range(1, rows // 2 + 1) if rows % n == 0))
