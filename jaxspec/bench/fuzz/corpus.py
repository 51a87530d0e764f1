"""Valid small files of every kind that is loaded, from which mutations start."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.bench.fuzz import checkpoint
from jaxspec.draft.registry import truncated
from jaxspec.draft.suffix_memory import SuffixMemory
from jaxspec.models.bert import BertConfig, BertEncoder
from jaxspec.models.drafter import DraftDecoder, feature_width
from jaxspec.models.length_head import LengthHead, LengthModel
from jaxspec.models.length_probe import LengthProbe
from jaxspec.models.load import load_model
from jaxspec.models.load.drafter_file import save_drafter
from jaxspec.models.load.probe_file import save_probe
from jaxspec.predict import index_file, predictor_file
from jaxspec.predict.formulation import Formulation
from jaxspec.predict.index import Rows
from jaxspec.sched.plan import Lookahead
from jaxspec.sched.sim.cost import StepLoad
from jaxspec.sched.sim.recording import Recording, Seen, Step

#: Length of the vectors of `lengths.safetensors`, and of the fixed text's.
WIDTH = 8


def write(folder: Path) -> None:
    """Write all files: folders `hf`, `sharded`, and files named after their kind."""
    model = load_model(str(checkpoint.write_folder(folder / "hf")))
    checkpoint.write_folder(folder / "sharded", shards=2)
    checkpoint.write_gguf(folder / "model.gguf")
    config, weights = truncated(model, 1)
    whole = {name: jnp.asarray(weights[name]) for name in weights}
    half = np.arange(0, model.config.vocab_size, 2, dtype=np.int32)
    whole |= {"vocab": jnp.asarray(half), "head": whole["head"][:, half]}
    save_drafter(DraftDecoder(config, whole), "tiny", folder / "drafter.safetensors")
    save_probe(LengthProbe(feature_width(model.config), 4, nnx.Rngs(0)), "tiny", folder / "probe.safetensors")
    _write_predictor(folder / "predictor.safetensors")
    vectors = np.eye(3, WIDTH, dtype=np.float32)
    rows = Rows(vectors, np.ones(3, np.float32), np.arange(3), np.arange(3))
    index_file.write(folder / "lengths.safetensors", rows, "tiny", vectors[0])
    memory = SuffixMemory(1000, path=folder / "answers.safetensors", model="tiny")
    memory.learn("a", list(range(20)))
    memory.flush()
    for name, text in _TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    step = Step(0.0, Lookahead(), [(0, 0, 5)], 0.01, 0.01, StepLoad(5), [0])
    Recording([Seen(0.0, 5, 4, 4, None, [(2, 1)])], [step]).save(folder / "recording.json")


def _write_predictor(path: Path) -> None:
    tokenizer = checkpoint.tokenizer()
    sizes = BertConfig(tokenizer.get_vocab_size(), 32, 1, 2, 32, max_positions=32)
    formulation = Formulation.fit("reg_mse", [1.0, 10.0, 100.0])
    head = LengthHead(sizes.hidden, 4, formulation.outputs, nnx.Rngs(1))
    model = LengthModel(BertEncoder(sizes, nnx.Rngs(0)), head)
    predictor_file.write(predictor_file.PredictorFile(model, formulation, tokenizer, "tiny", {"target": "x"}, 16), path)


_TEXTS = {
    "arrivals.csv": "arrival_s,input_tokens,output_tokens\n0,5,7\n0.5,6,8\n1.25,7,9\n",
    "arrivals.jsonl": "".join(
        json.dumps({"timestamp": t, "input_length": 600, "output_length": 9, "hash_ids": [1, t]}) + "\n" for t in (0,
        50)
    ),
    "lengths.csv": "input_tokens,output_tokens,predicted\n5,7,6\n6,8,9\n",
    "lengths.jsonl": json.dumps({"turns": ["a prompt"], "reference": "an answer"}) + "\n",
    "prompts.jsonl": json.dumps({"turns": ["a prompt"]}) + "\n",
    "profile.json": json.dumps({"buckets": [1, 4, 16], "step": [0.01, 0.012, 0.02]}),
    "process.json": json.dumps({"mean": 0.5}),
    "config.yaml": "model: tiny\nmax_num_seqs: 8\norder: sjf\ndraft: [suffix]\nslo:\n  tpot_ms: 50\n"
    "token_buckets: [1, 4, 16]\n",
}  # fmt: skip
