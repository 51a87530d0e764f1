"""Trains a drafter on the target model's answers: cross-entropy to its distributions, at every depth of a draft.

As in EAGLE-3 (Li et al. 2025, §3.2) nothing ties the drafter's outputs to the target's features: they learn what the
next depths need (`unroll`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxspec.draft.distill.begin import begin, successors, vocabulary
from jaxspec.draft.distill.config import DistillConfig
from jaxspec.draft.distill.data import Corpus, one_ahead, padded
from jaxspec.draft.distill.unroll import unroll
from jaxspec.models.decoder import head_of, scaled_logits
from jaxspec.models.drafter import DraftDecoder
from jaxspec.models.load import LoadedModel
from jaxspec.models.load.drafter_file import save_drafter
from jaxspec.progress import progress
from jaxspec.train_predictor import curve
from jaxspec.train_predictor.answers import origin_of
from jaxspec.train_predictor.checkpoints import Checkpoints
from jaxspec.train_predictor.report import few

#: Depths that the evaluation on held-out rows measures.
DEPTH = 5
#: Fewer held-out answers get a warning; each has many positions.
FEW_ANSWERS = 10
#: The baseline, in words.
BIGRAM = "most frequent successor"


#: Made on the host, and copied to the device as it is.
Rows: TypeAlias = np.ndarray | jax.Array


class Batch(NamedTuple):
    """One step's rows.

    tokens    `[B, L]` int32
    features  `[B, L, TAPS * hidden]` float16, the target's
    use       `[B, L]` bool, positions that count: the next token is the answer's, and the row does not just fill the
              batch
    """

    tokens: Rows
    features: Rows
    use: Rows


class Evaluation(TypedDict):
    """One evaluation on the held-out rows.

    tokens           tokens trained on so far, counted again in every epoch
    hits             per depth, the share of positions where the drafter's likeliest token is the target's
    accepted_length  mean accepted length of a greedy chain, bonus token included
    bigram_hits, bigram_accepted_length   the same of a baseline: the most frequent successor of the last token in the
                     training answers, which is as good at every depth
    """

    tokens: int
    hits: list[float]
    accepted_length: float
    bigram_hits: float
    bigram_accepted_length: float


def accepted(hit: np.ndarray, use: np.ndarray) -> int:
    """Sum over the positions `use [B, L]` of the tokens that are accepted of a chain that starts there, for the hits
    `[DEPTH, B, L]` of its depths. A chain that leaves the row has ended."""
    total, all_accepted = 0, use.copy()
    for j in range(DEPTH):  # the token at depth j was proposed at the position j further on
        shifted = np.zeros_like(all_accepted)
        shifted[:, : use.shape[1] - j] = (hit[j] & use)[:, j:]
        all_accepted &= shifted
        total += int(all_accepted.sum())
    return total


def plot(evaluations: Sequence[Evaluation], axes: Any) -> None:
    """Plot accepted length against tokens trained on, on matplotlib's `axes`."""
    axes.plot(
        [e["tokens"] for e in evaluations], [e["accepted_length"] for e in evaluations], marker="o", label="drafter"
    )
    known = [e for e in evaluations if "bigram_accepted_length" in e]  # checkpoints of earlier versions lack it
    if known:
        axes.axhline(known[0]["bigram_accepted_length"], color="grey", linestyle="--", label=BIGRAM)
    axes.set(xlabel="tokens trained on", ylabel="accepted length, held-out prompts")
    axes.legend()


def trained(path: tuple[Any, ...], _: Any) -> bool:
    """Whether a weight is trained: layers, mix, fuse and norm are; embedding and head stay the target's."""
    return path[0] in ("layers", "mix", "fuse", "norm")


def loss_and_hits(
    model: DraftDecoder, batch: Batch, final_norm: jax.Array, passes: int, discount: float, parallel: bool = False
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The mean loss of all passes, each weighted `discount` times the one before; and per pass `[passes]`, the share of
    positions where the likeliest token of drafter and target agree, and the loss.

    Both are over the draft vocabulary and positions in use. `final_norm [hidden]`: the weight of the target's final
    norm. A plain drafter reads no features, so it makes one pass, unless it is `parallel`.
    """
    losses, hits = [], []
    head = jax.lax.stop_gradient(model.head[...])
    features = jnp.asarray(batch.features, head.dtype)
    target_logits = scaled_logits(model.config, final_states(features, final_norm) @ head)
    target_probs = jax.nn.softmax(target_logits)
    best = jnp.argmax(target_logits, -1)
    count = jnp.maximum(jnp.sum(batch.use), 1)
    passes = passes if model.conditioned or parallel else 1
    outputs = jax.vmap(lambda t, f: unroll(model, t, f, passes, parallel), out_axes=1)(batch.tokens, features)
    for output in outputs:
        logits = scaled_logits(model.config, output @ head)
        cross_entropy = -jnp.sum(target_probs * jax.nn.log_softmax(logits), -1)
        losses.append(jnp.sum(cross_entropy * batch.use) / count)
        hits.append(jnp.sum((jnp.argmax(logits, -1) == best) * batch.use) / count)
    per_pass, weights = jnp.stack(losses), discount ** jnp.arange(passes)
    return per_pass @ weights / weights.sum(), (jnp.stack(hits), per_pass)


def final_states(features: jax.Array, final_norm: jax.Array) -> jax.Array:
    """The target's final hidden states `[…, hidden]`: its last tapped layer is the last one, before the final norm."""
    return features[..., -final_norm.shape[0] :] * final_norm


class Trainer:
    """A training run; `run` resumes from the last checkpoint in its folder."""

    def __init__(self, config: DistillConfig, target: LoadedModel, data: Corpus):
        self.config, self.target, self.data = config, target, data
        c = target.config
        size = max(8192, c.vocab_size // 6) if config.vocabulary == "auto" else config.vocabulary
        self.vocab = vocabulary(data, size, c.eos_token_ids, c.vocab_size)
        model = begin(config, target, self.vocab)
        self.graph, learn, self.rest = nnx.split(model, trained, ...)
        self._final_norm = jnp.asarray(target.weights["norm"], jnp.float32)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, config.learning_rate, config.warmup, max(config.steps, config.warmup + 1), config.learning_rate * 0.05
        )
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))
        self.state: dict[str, Any] = {"learn": learn, "optimizer": self.optimizer.init(learn)}
        #: Steps done, and tokens trained on so far.
        self.step, self.tokens = 0, 0
        self.evaluations: list[Evaluation] = []
        self._update = jax.jit(self._make_update(), donate_argnums=0)
        self._evaluate = jax.jit(self._make_evaluate())
        self._successor = jnp.asarray(successors(data, c.vocab_size))

    @property
    def about(self) -> str:
        """What is trained on, and how much the draft vocabulary covers."""
        d, covered, answers = self.data, np.isin(self.data.tokens, self.vocab), int(self.data.held_out.sum())
        held = [covered[i, d.start[i] : d.length[i]] for i in np.flatnonzero(d.held_out)]
        said = (
            f"{len(d)} answers with {d.answer_tokens} tokens, {answers} of them held out; the draft vocabulary has "
            f"{len(self.vocab)} of {self.target.config.vocab_size} tokens, which are {np.concatenate(held).mean():.1%} "
            "of the held-out answers'"
        )
        return (
            said
            if answers >= FEW_ANSWERS
            else f"{said}\n{few('hits and accepted length', answers, 'held-out answers')}"
        )

    @property
    def model(self) -> DraftDecoder:
        """The drafter with the current weights."""
        return nnx.merge(self.graph, self.state["learn"], self.rest)

    def _make_update(self) -> Any:
        def update(state: dict[str, Any], rest: Any, batch: Batch) -> tuple[dict[str, Any], Any]:
            """Returns the state after the step; hits and losses before it, `[passes]` each."""

            def loss(learn: Any) -> Any:
                model, c = nnx.merge(self.graph, learn, rest), self.config
                return loss_and_hits(model, batch, self._final_norm, c.passes, c.discount, c.parallel)

            (_, (hits, losses)), grads = jax.value_and_grad(loss, has_aux=True)(state["learn"])
            updates, optimizer = self.optimizer.update(grads, state["optimizer"], state["learn"])
            return {"learn": optax.apply_updates(state["learn"], updates), "optimizer": optimizer}, (hits, losses)

        return update

    def _make_evaluate(self) -> Any:
        def evaluate(learn: Any, rest: Any, head: jax.Array, successor: jax.Array, batch: Batch) -> jax.Array:
            """Hits `[DEPTH + 1, B, L]` bool: whether at each depth the drafter's likeliest token is the target's over
            the whole vocabulary (`head [hidden, vocab]`), and whether the token's most frequent `successor [vocab]` is.
            """
            model = nnx.merge(self.graph, learn, rest)

            def row(row: Batch) -> jax.Array:
                features = jnp.asarray(row.features, head.dtype)
                best = jnp.argmax(final_states(features, self._final_norm) @ head, -1)
                outputs = unroll(model, jnp.asarray(row.tokens), features, DEPTH, self.config.parallel)
                drafted = model.vocab[...][jnp.argmax(outputs @ model.head[...], -1)]
                return jnp.concatenate([drafted, successor[row.tokens][None]]) == best

            # Row by row: logits of all rows over the whole vocabulary would be by far the largest array.
            return jax.lax.map(row, batch).swapaxes(0, 1)

        return evaluate

    def groups(self) -> Iterator[np.ndarray]:
        """Row indices of the training batches, epoch after epoch without end. Every epoch forms and orders its batches
        of rows of similar length differently."""
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
        """A full batch of these rows; missing ones are filled with repeated rows that do not count. With `prompts`
        the prompts' tokens count too."""
        d = self.data
        filled = np.resize(rows, self.config.batch)
        width = min(padded(int(d.length[filled].max())), d.tokens.shape[1])
        position = np.arange(width)
        use = (position >= (0 if prompts else d.start[filled, None] - 1)) & (position < d.length[filled, None] - 1)
        use[len(rows) :] = False
        return Batch(d.tokens[filled, :width], np.stack([d.features[r, :width] for r in filled]), use)

    def _batches(self) -> Generator[tuple[int, Batch]]:
        """Batches that are left to train on, each with its number of positions in use, on the device. A thread makes
        the next one during a step."""
        groups = islice(self.groups(), self.step, self.config.steps)  # a resumed run continues within its epoch

        def make(rows: np.ndarray) -> tuple[int, Batch]:
            batch = self.batch(rows, self.config.prompts)
            return int(batch.use.sum()), jax.device_put(batch)

        with ThreadPoolExecutor(1, "batches") as maker:
            for batch in one_ahead(maker.submit(make, rows) for rows in groups):
                yield batch.result()

    def run(self, folder: Path) -> None:
        """Train to the configured number of steps. Writes checkpoints, the drafter (see `export`) and the learning
        curve to `folder`.

        Raises `ConfigError` if the checkpoints there belong to another run or are damaged.
        """
        with Checkpoints(folder, self._identity()) as checkpoints:
            self._restore(checkpoints)
            start = time.monotonic()
            if not self.step:
                self._record_evaluation(start)
            done = self.config.steps, self.step
            with closing(self._batches()) as batches, progress("training steps", *done) as advance:
                before = losses = None
                for tokens, batch in batches:
                    jax.block_until_ready(before)  # no more than one step waits behind the one that runs
                    before = losses
                    self.state, (hits, losses) = self._update(self.state, self.rest, batch)
                    self.step, self.tokens = self.step + 1, self.tokens + tokens
                    advance()
                    if self.step % self.config.every == 0 or self.step == self.config.steps:
                        trained = f"loss {losses[0]:.3f}, {hits[0]:.1%} of the training batch right, "
                        self._record_evaluation(start, trained)
                        self._save(checkpoints, folder)
        curve.write(self.evaluations, folder, self.target.name, plot)  # also if there was nothing left to train

    def _record_evaluation(self, start: float, trained: str = "") -> None:
        """Evaluate, and print a line. `start`: when this process began to train; `trained`: what the last step said."""
        self.evaluations.append(e := self.evaluate())
        first = self.evaluations[0]
        before = "" if first is e or first["tokens"] else f"; untrained: {first['accepted_length']:.2f}"
        print(
            f"step {self.step}, {time.monotonic() - start:.0f} s, {self.tokens} tokens: {trained}first draft right "
            f"{e['hits'][0]:.1%} ({BIGRAM}: {e['bigram_hits']:.1%}), accepted length {e['accepted_length']:.2f} "
            f"({BIGRAM}: {e['bigram_accepted_length']:.2f}{before})", flush=True,
        )  # fmt: skip

    def _identity(self) -> dict[str, Any]:
        """Settings and data that must equal those of the checkpoints to resume from. The number of steps is among them,
        because the learning rate schedule depends on it."""
        settings = self.config.model_dump(exclude={"data", "target", "work", "out", "every"})
        settings["vocabulary"] = len(self.vocab)
        if not self.config.parallel:
            del settings["parallel"]  # checkpoints of before this setting can still be resumed
        if self.config.begin.endswith(".safetensors"):  # the file of this name may have changed
            with Path(self.config.begin).open("rb") as file:
                settings["begin"] += f" ({hashlib.file_digest(file, 'sha256').hexdigest()[:16]})"
        return {"target": str(origin_of(self.target)), "answers": self.data.digest(), **settings}

    def _restore(self, checkpoints: Checkpoints) -> None:
        """Resume from the last checkpoint, if there is one."""
        if (log := checkpoints.log()) is None:
            return
        self.state = checkpoints.restore(self.state)
        self.step, self.tokens, self.evaluations = log["step"], log["tokens"], log["curve"]
        print(f"resumed after step {self.step}", flush=True)

    def _save(self, checkpoints: Checkpoints, folder: Path) -> None:
        """Write a checkpoint, the drafter so far and the learning curve."""
        checkpoints.save(self.step, self.state, {"step": self.step, "tokens": self.tokens, "curve": self.evaluations})
        self.export(folder / "drafter.safetensors")
        curve.write(self.evaluations, folder, self.target.name, plot)

    def evaluate(self, rows: int = 32) -> Evaluation:
        """Hit rate per depth and mean accepted length (bonus token included) of a greedy chain, on up to `rows`
        held-out rows, whose text is the target's: what would follow a rejected token is not drafted.
        """
        held_out = np.flatnonzero(self.data.held_out)[:rows]
        hits, lengths, count = np.zeros(DEPTH + 1), np.zeros(2), 0
        for i in range(0, len(held_out), self.config.batch):
            batch = self.batch(held_out[i : i + self.config.batch])
            hit = np.asarray(self._evaluate(self.state["learn"], self.rest, self._full_head, self._successor, batch))
            use = np.asarray(batch.use)
            hits += (hit & use).sum((1, 2))
            lengths += accepted(hit[:DEPTH], use), accepted(np.stack([hit[DEPTH]] * DEPTH), use)
            count += int(use.sum())
        *rates, bigram = (round(float(h), 4) for h in hits / max(count, 1))
        own, theirs = (round(1 + float(total), 4) for total in lengths / max(count, 1))
        return {
            "tokens": self.tokens, "hits": rates, "accepted_length": own, "bigram_hits": bigram,
            "bigram_accepted_length": theirs,
        }  # fmt: skip

    @cached_property
    def _full_head(self) -> jax.Array:
        """The target's head `[hidden, vocab]`."""
        return jnp.asarray(head_of(self.target.config, self.target.weights), jnp.float32)

    def export(self, path: Path) -> None:
        """Write the drafter as a file for `jaxspec.models.load.drafter_file`; a parallel one is not written."""
        if not self.config.parallel:
            save_drafter(self.model, self.target.name, path)
