"""Fine-tunes an encoder and a head to predict output lengths, in SSJF's two phases (§3.1): all weights, then the head.

A phase ends after its steps, or early when the validation loss stops falling. The weights with the lowest validation
loss start the next phase and are exported. In the second phase the encoder's vectors are computed once and reused.
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
from jaxspec.train_predictor import curve
from jaxspec.train_predictor.checkpoints import Checkpoints, digest
from jaxspec.train_predictor.config import PredictorConfig
from jaxspec.train_predictor.data import TEST, TRAIN, VALIDATION, Corpus, batches
from jaxspec.train_predictor.evaluate import Evaluation, Metrics, evaluate, plot, rounded
from jaxspec.train_predictor.names import target_name
from jaxspec.train_predictor.report import baseline, evaluation_line, report_lines

#: Widths that batches are padded to; each compiles once.
WIDTHS = (32, 64, 96, 128, 192, 256, 384, 512)
#: Batches per window within which rows are sorted by width.
WINDOW = 32
#: Most tokens per gradient computation, which bounds memory: larger batches accumulate gradients over pieces.
TOKENS = 4096
#: The encoder's modules that `freeze_embeddings` does not train.
EMBEDDINGS = ("tokens", "positions", "types")


class Batch(NamedTuple):
    """One step's rows.

    ids      `[B, T]` int32
    tokens   `[B]` int32, tokens of each row without padding
    length   `[B]` float32, tokens of the answer
    capped   `[B]` bool, whether the answer was cut
    weights  `[B]` float32, 0 for rows that only fill the batch
    """

    ids: jax.Array
    tokens: jax.Array
    length: jax.Array
    capped: jax.Array
    weights: jax.Array

    @property
    def mask(self) -> jax.Array:
        return jnp.arange(self.ids.shape[-1]) < self.tokens[..., None]


class Progress(NamedTuple):
    """Progress of a run.

    phase  1, 2, or 3 when the run has ended
    step   steps done in this phase
    steps  steps done in both phases
    best   lowest validation loss
    worse  evaluations since then
    """

    phase: int = 1
    step: int = 0
    steps: int = 0
    best: float = math.inf
    worse: int = 0


class Trainer:
    """A training run; `run` resumes from the last checkpoint in its folder.

    Raises `ConfigError` if the formulation cannot be fitted to the data.
    """

    def __init__(self, config: PredictorConfig, loaded: LoadedEncoder, data: Corpus):
        self.config, self.loaded, self.data, self.target = config, loaded, data, target_name(config.target)
        train = data.rows(TRAIN)
        self.bounds = np.asarray(class_bounds(data.length[train], config.classes))
        try:
            self.formulation = Formulation.fit(
                config.formulation, data.length[train], config.classes, config.scale, config.ranking
            )
        except ValueError as error:
            raise ConfigError(f"data: {error}") from None
        head = LengthHead(loaded.config.hidden, config.width, self.formulation.outputs, nnx.Rngs(config.seed))
        frozen = EMBEDDINGS if config.freeze_embeddings else ()
        self.encoder_graph, learn, self.rest = nnx.split(loaded.encoder, lambda path, _: path[0] not in frozen, ...)
        self.head_graph, head_state = nnx.split(head)
        weights = {"encoder": copied(learn), "head": head_state}
        self.optimizers = self._optimizers()
        self.state: dict[str, Any] = {**weights, "optimizer": self.optimizers[0].init(weights)}
        #: Weights with the lowest validation loss.
        self.best: dict[str, Any] = copied(weights)
        self.at = Progress()
        self.evaluations: list[Evaluation] = []
        self._key = jax.random.key(config.seed)
        self._update = jax.jit(self._make_update(), donate_argnums=0)
        self._update_head = jax.jit(self._make_update_head(), donate_argnums=0)
        self._first = jax.jit(lambda learn, rest, b: self._encoder(learn, rest).first(b.ids, b.mask))
        self._read = jax.jit(lambda head, first: nnx.merge(self.head_graph, head)(first))

    def _encoder(self, learn: Any, rest: Any) -> Any:
        return nnx.merge(self.encoder_graph, learn, rest)

    def _optimizers(self) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
        """The optimizers of the first and the second phase."""
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
        """Loss of the encoder's vectors `first [B, H]`, after dropout."""
        if self.config.dropout:
            kept = jax.random.bernoulli(key, 1 - self.config.dropout, first.shape)
            first = jnp.where(kept, first / (1 - self.config.dropout), 0)
        raw = nnx.merge(self.head_graph, head)(first)
        return self.formulation.loss(raw, batch.length, batch.weights, batch.capped)

    def _make_update(self) -> Callable[..., Any]:
        def update(state: dict[str, Any], rest: Any, batch: Batch, step: jax.Array) -> tuple[dict[str, Any], jax.Array]:
            """Returns the state after the step and the loss before it."""
            key = jax.random.fold_in(self._key, step)

            def loss(weights: Any, piece: Batch, key: jax.Array) -> jax.Array:
                first = self._encoder(weights["encoder"], rest).first(piece.ids, piece.mask)
                return self._loss(weights["head"], first, piece, key)

            def add(total: Any, piece: tuple[Batch, jax.Array]) -> tuple[Any, None]:
                share = jnp.sum(piece[0].weights) / jnp.sum(batch.weights)
                loss_and_grads = jax.value_and_grad(loss)(weights, *piece)
                return jax.tree.map(lambda t, v: t + share * v, total, loss_and_grads), None

            weights = {"encoder": state["encoder"], "head": state["head"]}
            count = pieces(*batch.ids.shape)
            if count == 1:
                value, grads = jax.value_and_grad(loss)(weights, batch, key)
            else:
                split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
                zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), weights))
                (value, grads), _ = jax.lax.scan(add, zeros, (split, jax.random.split(key, count)))
            updates, optimizer = self.optimizers[0].update(grads, state["optimizer"], weights)
            return {**optax.apply_updates(weights, updates), "optimizer": optimizer}, value  # type: ignore[dict-item]

        return update

    def _make_update_head(self) -> Callable[..., Any]:
        def update(
            state: dict[str, Any], vectors: jax.Array, batch: Batch, rows: jax.Array, step: jax.Array
        ) -> tuple[dict[str, Any], jax.Array]:
            """One optimizer step of the head alone. `rows [B]` index `vectors [N, H]`."""
            key = jax.random.fold_in(self._key, step)
            value, grads = jax.value_and_grad(self._loss)(state["head"], vectors[rows], batch, key)
            updates, optimizer = self.optimizers[1].update(grads, state["optimizer"], state["head"])
            return {"head": optax.apply_updates(state["head"], updates), "optimizer": optimizer}, value

        return update

    # Batches

    def batch(self, rows: np.ndarray, read: bool = True) -> Batch:
        """A full batch of these rows; missing ones are filled with repeated rows of weight 0.

        Without `read` the ids are left out (`T` = 0), for steps that do not run the encoder.
        """
        d, size = self.data, self.config.batch
        filled = np.resize(rows, size)
        tokens = np.asarray([len(d.ids[r]) for r in filled], np.int32)
        # No wider than `longest`: an encoder may have fewer positions than the next fixed width.
        ids = np.zeros((size, min(width_of(int(tokens.max())), self.config.longest) if read else 0), np.int32)
        for i, r in enumerate(filled if read else ()):
            ids[i, : tokens[i]] = d.ids[r]
        weights = (np.arange(size) < len(rows)).astype(np.float32)
        arrays = (ids, tokens, d.length[filled].astype(np.float32), d.capped[filled], weights)
        return Batch(*map(jnp.asarray, arrays))

    def epochs(self, phase: int) -> Iterator[np.ndarray]:
        """Row indices of the training batches, epoch after epoch without end."""
        rows, widths, size = self.data.rows(TRAIN), [len(ids) for ids in self.data.ids], self.config.batch
        epoch = 0
        while True:
            rng = np.random.default_rng((self.config.seed, phase, epoch))
            # Phase 2 reads vectors of one size, so sorting by width gains nothing.
            yield from batches(rows, widths, size, WINDOW * size if phase == 1 else size, rng)
            epoch += 1

    def vectors(self, rows: np.ndarray, weights: dict[str, Any]) -> np.ndarray:
        """The encoder's vectors of these rows, `[rows, H]` float32, computed with `weights`."""
        out = np.zeros((len(rows), self.loaded.config.hidden), np.float32)
        order = np.argsort([len(self.data.ids[r]) for r in rows], kind="stable")
        for i in range(0, len(rows), self.config.batch):
            part = order[i : i + self.config.batch]
            out[part] = np.asarray(self._first(weights["encoder"], self.rest, self.batch(rows[part])))[: len(part)]
        return out

    # The run

    def run(self, folder: Path) -> Metrics:
        """Train both phases to the end. Returns the metrics on the test part.

        Writes checkpoints, `curve.json`, `curve.png` and `report.json` (the metrics and their baselines) to `folder`.
        Raises `ConfigError` for checkpoints of another run or damaged ones, and if the loss is not finite.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with Checkpoints(folder, self._identity()) as checkpoints:
            self._restore(checkpoints)
            if self.at.phase == 1:
                self._phase(checkpoints, folder, self.config.steps, self._steps_of_all())
            if self.at.phase == 2:
                self._phase(checkpoints, folder, self.config.head_steps, self._steps_of_head())
        curve.write(self.evaluations, folder, self.target, plot)
        metrics, constant = self.report(), self.constant(TEST)
        numbers = {**rounded(metrics), "baseline": rounded(constant)}
        (folder / "report.json").write_text(json.dumps(numbers, indent=1) + "\n")
        print(report_lines(metrics, constant), flush=True)
        return metrics

    def _phase(
        self,
        checkpoints: Checkpoints,
        folder: Path,
        steps: int,
        functions: tuple[Callable[[np.ndarray], jax.Array], Callable[[], np.ndarray]],
    ) -> None:
        """Run the current phase to its end, then switch to the next one with the best weights.

        `functions`: a training step, and the raw outputs for the validation part.
        """
        step, validate = functions
        groups = islice(self.epochs(self.at.phase), self.at.step, None)  # a resumed run continues within its epoch
        start, losses = time.monotonic(), []
        if not self.evaluations:
            self._record_evaluation(validate(), None, start)
        with progress(f"phase {self.at.phase}, steps", steps, self.at.step) as advance:
            while self.at.step < steps and self.at.worse < self.config.patience:
                losses.append(step(next(groups)))
                self.at = self.at._replace(step=self.at.step + 1, steps=self.at.steps + 1)
                advance()
                if self.at.step % self.config.every == 0 or self.at.step == steps:
                    mean = float(np.mean([float(loss) for loss in losses]))
                    losses = []
                    self._record_evaluation(validate(), mean, start)
                    self._save(checkpoints, folder)
        self._next_phase()
        self._save(checkpoints, folder)

    def _steps_of_all(self) -> tuple[Callable[[np.ndarray], Any], Callable[[], np.ndarray]]:
        """Phase 1: a training step on a group of rows, and the raw outputs for the validation part."""
        rows = self.data.rows(VALIDATION)

        def step(group: np.ndarray) -> jax.Array:
            self.state, loss = self._update(self.state, self.rest, self.batch(group), np.int32(self.at.steps))
            return loss

        return step, lambda: np.asarray(self._read(self.state["head"], self.vectors(rows, self.state)))

    def _steps_of_head(self) -> tuple[Callable[[np.ndarray], Any], Callable[[], np.ndarray]]:
        """Training step and validation of phase 2, which trains the head on the vectors of the best encoder."""
        rows = self.data.rows(TRAIN)
        vectors = jnp.asarray(self.vectors(rows, self.best))
        validation = jnp.asarray(self.vectors(self.data.rows(VALIDATION), self.best))
        index = np.full(len(self.data), -1, np.int32)  # row -> its place in `vectors`
        index[rows] = np.arange(len(rows))

        def step(group: np.ndarray) -> jax.Array:
            chosen = index[np.resize(group, self.config.batch)]
            batch = self.batch(group, read=False)
            self.state, loss = self._update_head(self.state, vectors, batch, chosen, np.int32(self.at.steps))
            return loss

        return step, lambda: np.asarray(self._read(self.state["head"], validation))

    def _record_evaluation(self, raw: np.ndarray, train: float | None, start: float) -> None:
        """Evaluate the raw outputs `[rows, outputs]` for the validation part; keep the weights if they are the best.

        `train`: mean training loss since the previous evaluation; `start`: when this process started the phase.
        Raises `ConfigError` if the loss is not finite.
        """
        rows = self.data.rows(VALIDATION)
        length, capped = self.data.length[rows], self.data.capped[rows]
        weights = jnp.ones(len(rows))
        loss = float(
            self.formulation.loss(jnp.asarray(raw), jnp.asarray(length, jnp.float32), weights, jnp.asarray(capped))
        )
        if not math.isfinite(loss):
            raise ConfigError(f"learning_rate: at step {self.at.steps} the loss is {loss}; set a lower rate")
        metrics = evaluate(self.formulation.lengths(raw), length, capped, self.bounds)
        numbers = rounded({"train": train, "validation": loss, "mae": metrics["mae"], "tau": metrics["tau"]})
        self.evaluations.append(Evaluation(step=self.at.steps, phase=self.at.phase, **numbers))
        first, last, seconds = self.evaluations[0], self.evaluations[-1], time.monotonic() - start
        print(evaluation_line(last, first, self.constant(VALIDATION), seconds), flush=True)
        if loss < self.at.best:
            self.at = self.at._replace(best=loss, worse=0)
            self.best |= {name: copied(self.state[name]) for name in self.best if name in self.state}
        else:
            self.at = self.at._replace(worse=self.at.worse + 1)

    def _next_phase(self) -> None:
        """Switch to the next phase: the best head and a fresh optimizer."""
        self.at = self.at._replace(phase=self.at.phase + 1, step=0, worse=0)
        head = copied(self.best["head"])
        self.state = {"head": head, "optimizer": self.optimizers[1].init(head)}

    # Checkpoints

    def _identity(self) -> dict[str, Any]:
        """Settings and data that must equal those of the checkpoints to resume from."""
        settings = self.config.model_dump(exclude={"data", "target", "cap", "limit", "work", "out"})
        read = {"layers": self.loaded.config.layers, "frozen weights": digest(self.rest)}
        return {**settings, **read, "rows and lengths": self.data.digest()}

    def _restore(self, checkpoints: Checkpoints) -> None:
        """Resume from the last checkpoint, if there is one."""
        if (log := checkpoints.log()) is None:
            return
        at = Progress(*log["at"])
        if at.phase > 1:
            self._next_phase()  # the state's structure that the checkpoint has
        restored = checkpoints.restore({"state": self.state, "best": self.best})
        self.state, self.best, self.at, self.evaluations = restored["state"], restored["best"], at, log["curve"]
        print(f"resumed after step {at.steps}", flush=True)

    def _save(self, checkpoints: Checkpoints, folder: Path) -> None:
        """Write a checkpoint and the learning curve."""
        log = {"at": list(self.at), "curve": self.evaluations}
        checkpoints.save(self.at.steps + self.at.phase - 1, {"state": self.state, "best": self.best}, log)
        curve.write(self.evaluations, folder, self.target, plot)

    # The result

    def raw(self, rows: np.ndarray) -> np.ndarray:
        """Raw outputs `[rows, outputs]` with the best weights."""
        return np.asarray(self._read(self.best["head"], self.vectors(rows, self.best)))

    def calibrated(self) -> Formulation:
        """The formulation, calibrated on the training part if it predicts scores."""
        return self.formulation.calibrated(self.raw(self.data.rows(TRAIN)))

    def report(self) -> Metrics:
        """Metrics on the test part, with the best weights."""
        rows = self.data.rows(TEST)
        predicted = self.calibrated().lengths(self.raw(rows))
        return evaluate(predicted, self.data.length[rows], self.data.capped[rows], self.bounds)

    def constant(self, part: int) -> Metrics:
        """The metrics of predictions that do not depend on the prompt, on this part."""
        d, rows = self.data, self.data.rows(part)
        return baseline(d.length[d.rows(TRAIN)], d.length[rows], d.capped[rows], self.bounds)

    def predictor(self, name: str) -> ProxyPredictor:
        """The trained predictor, with the best weights."""
        encoder = self._encoder(self.best["encoder"], self.rest)
        head = nnx.merge(self.head_graph, self.best["head"])
        about = {"target": self.target, "encoder": self.config.encoder, "data": str(self.data)}
        return ProxyPredictor(encoder, head, self.calibrated(), self.loaded.tokenizer, name, about, self.config.longest)


def copied(tree: Any) -> Any:
    """A copy of a pytree's arrays: a training step donates its state."""
    return jax.tree.map(jnp.copy, tree)


def width_of(tokens: int) -> int:
    """The width that a batch with rows of up to `tokens` tokens is padded to."""
    return next((width for width in WIDTHS if tokens <= width), -(-tokens // 128) * 128)


def pieces(rows: int, width: int) -> int:
    """The number of equal pieces of a batch: as few as keep a piece within `TOKENS`, each of at least two rows."""
    divisors = [n for n in range(1, rows // 2 + 1) if rows % n == 0]
    return next((n for n in divisors if rows // n * width <= TOKENS), divisors[-1])
