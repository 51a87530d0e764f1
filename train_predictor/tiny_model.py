"""Makes a tiny chat model, to try training with: python -m jaxspec.train_predictor.tiny_model FOLDER

Writes a Hugging Face folder of a Llama with 0.1 million weights, and prompts for it, `prompts.jsonl` in the folder.
Needs no network. The model learns to enumerate: "List 3 owls." is answered by "1 owl, 2 owl, 3 owl". So its answers'
lengths can be predicted from the prompts, and its next tokens by a drafter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxspec.bench.options import count
from jaxspec.config import ConfigError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.decoder import Decoder, forward
from jaxspec.models.load.files import replacing
from jaxspec.models.load.hf_layouts import LLAMA
from jaxspec.models.load.lazy_transformers import import_transformers
from jaxspec.models.load.parts import fused_parts, part_shapes, weight_shapes
from jaxspec.progress import progress
from jaxspec.train_predictor import command as training
from jaxspec.train_predictor import ending

PROG = "jaxspec.train_predictor.tiny_model"
NAMES = (
    "owl", "fox", "river", "hill", "boat", "lamp", "tree", "cloud", "stone", "bird", "map", "bell", "road", "star",
    "door", "cup",
)  # fmt: skip
#: The longest list; tokens of a training row, and rows of a batch.
MOST, ROW, BATCH = 20, 96, 32
END = "<|end|>"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
#: Prompt -> answer.
TEXTS = {
    f"List {most} {name}s.": ", ".join(f"{i} {name}" for i in range(1, most + 1))
    for name in NAMES for most in range(1, MOST + 1)
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=count, default=400, help="training steps (default: 400)")
    args = parser.parse_args(argv)
    folder = args.folder
    try:
        training.check_folder("folder", folder)
        words = tokenizer()
        config = DecoderConfig("llama", len(words), 64, 128, 2, 4, 2, 16, 1024, tie_embeddings=True)
        weights = trained(config, rows(words), args.steps)
    except KeyboardInterrupt:
        return ending.interrupted(PROG, argv, "nothing was written")
    except ModuleNotFoundError as error:
        return training.fail(PROG, training.lacking(error))
    except ConfigError as error:
        return training.fail(PROG, str(error))
    words.save_pretrained(folder)
    save(folder, config, weights)
    lines = [json.dumps({"id": f"tiny-{i}", "turns": [asked]}) for i, asked in enumerate(TEXTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    asked = ["--model", str(folder), "--prompts", str(folder / "prompts.jsonl"), "--temperature", "0", "0.8",
             "--max-tokens", "128"]  # fmt: skip
    files = [folder / name for name in ("model.safetensors", "prompts.jsonl")]
    ending.ended(files, ending.called("jaxspec.train_predictor.collect", asked))
    return 0


def tokenizer() -> Any:
    """A transformers tokenizer of whole words and numbers, and bytes for all other text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, letters = ["<|user|>", "<|assistant|>", END], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=448, special_tokens=special, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator([*TEXTS, *TEXTS.values()], trainer)
    fast = import_transformers().PreTrainedTokenizerFast
    return fast(tokenizer_object=made, eos_token=END, chat_template=TEMPLATE)


def rows(words: Any) -> np.ndarray:
    """Prompts and answers `[N, ROW]` int32, padded with -1."""
    out = np.full((len(TEXTS), ROW), -1, np.int32)
    for row, (asked, answer) in zip(out, TEXTS.items(), strict=True):
        said = words.apply_chat_template([{"role": "user", "content": asked}], tokenize=False) + answer + END
        ids = words.encode(said)[:ROW]
        row[: len(ids)] = ids
    return out


def trained(c: DecoderConfig, rows: np.ndarray, steps: int) -> dict[str, np.ndarray]:
    """Weights that have learned the `rows [N, ROW]`."""
    import optax  # the optional extra `train`

    rng = np.random.default_rng(0)
    weights = {
        name: jnp.ones(shape) if len(shape) == 1 else jnp.asarray(rng.normal(size=shape) * 0.05, jnp.float32)
        for name, shape in weight_shapes(c).items()
    }
    optimizer = optax.adamw(optax.cosine_decay_schedule(4e-3, steps))

    def loss(weights: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        model = Decoder(c, {**weights, "head": weights["embed"].T})
        logits = jax.vmap(lambda row: forward(model, row))(jnp.maximum(batch, 0)[:, :-1])
        use = batch[:, 1:] >= 0
        each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch[:, 1:], 0))
        return jnp.sum(each * use) / jnp.sum(use)

    @jax.jit
    def step(weights: dict[str, jax.Array], state: Any, batch: jax.Array) -> tuple[dict[str, jax.Array], Any]:
        updates, state = optimizer.update(jax.grad(loss)(weights, batch), state, weights)
        return optax.apply_updates(weights, updates), state  # type: ignore[return-value]

    state = optimizer.init(weights)
    with progress("training steps", steps) as advance:
        for _ in range(steps):
            weights, state = step(weights, state, jnp.asarray(rows[rng.integers(len(rows), size=BATCH)]))
            advance()
    return {name: np.asarray(weight) for name, weight in weights.items()}


def save(folder: Path, c: DecoderConfig, weights: dict[str, np.ndarray]) -> None:
    """Write the weights as Hugging Face names them, one tensor for each part of a fused weight, and `config.json`."""
    shapes, tensors = part_shapes(c), {LLAMA.names[name]: weights[name] for name in ("embed", "norm")}
    for layer in range(c.num_layers):
        for name, parts in fused_parts(c).items():
            ends = np.cumsum([shapes[part][0] for part in parts])[:-1]
            for part, value in zip(parts, np.split(weights[f"layers.{layer}.{name}"], ends, axis=-1), strict=True):
                tensors[LLAMA.names[part].format(layer)] = np.ascontiguousarray(value.T)
    with replacing(folder / "model.safetensors") as new:
        save_file(tensors, new)
    sizes = {
        "model_type": "llama", "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position, "tie_word_embeddings": True, "rms_norm_eps": c.norm_eps,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
