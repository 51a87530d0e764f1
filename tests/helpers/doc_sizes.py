"""How each command of the pages is run at a small size, and which ones are only looked at.

A command is run as it is written; options that come after its own, and count instead of them, make it small. The first
entry that fits is taken, so the longer beginnings stand first. `{model}`, `{encoder}` and `{url}` are the tiny models
and the running server of the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from helpers.paths import GOLDEN
from jaxspec import LLM
from jaxspec.config import parse_overrides
from jaxspec.predict.sentence_encoder import SentenceEncoder

#: What an engine of the tiny model needs, and nothing to keep for the next one.
_ENGINE = (
    " --set max_model_len=640 --set max_num_batched_tokens=64 --set token_buckets=[1,64] --set kv_cache_tokens=2560"
    " --set compilation_cache_dir="
)
_TINY = " --model {model}" + _ENGINE
#: With a drafter that is a model, there are more programs to compile.
_FEWER = _ENGINE + " --set max_num_seqs=2 --set max_num_batched_tokens=8 --set token_buckets=[8] --set draft_depth=2"
_FEW = " --num-prompts 3 --max-tokens 4"
_LOAD = _FEW + " --base-url {url} --request-rate 200"
_RECORDED = " --num-prompts 4 --request-rate 500 --max-tokens 40 --ignore-eos"
_TURN = " --engine-prompts 1 --engine-concurrency 1 --engine-tokens 4 --repeats 1"
_PIPELINE = " --pipeline-concurrency 2 --pipeline-tokens 4 --pipeline-levels 2 --repeats 1"
_KEPT = " --engine-jobs 4 --engine-scale 0.1 --engine-long 0.1 --engine-loads 3 --engine-light 1 --repeats 1"
#: Few steps of a predictor's training; the tiny encoder reads 48 tokens.
_TRAIN = (
    " --set target={model} --set encoder={encoder} --set longest=32 --set layers=1 --set test=0.3 --set batch=8"
    " --set steps=2 --set head_steps=2 --set every=2 --set warmup=1"
)
_DISTILL = " --set steps=2 --set every=2 --set longest=64 --set batch=2"
_SERVED = " --jobs 2 --turns 1 --max-tokens 4 --modes continuous --request-rate 500"
_HERE = " --processes 1 --keep keep"
_ONE_LOAD = {"MANY": 12, "LIMIT": 6.0, "RATES": (5,), "CVS": (2,), "SIZES": (2, 4)}
LAPS_SD_GRIDS = {
    "COUNTS": (4, 6), "QUEUES": (2, 4), "ARRIVALS": (None, 1.5), "SIGMAS": (0.5,), "SPREADS": (0.1, 0.2),
    "LOADS": (0.9,), "MEANS": (0.5,), "LONGEST_CHAINS": (4,), "QUANTA": (80.0,), "SWITCHED": (20, 500), "SIZES": (8,),
    "CROWDS": (5,), "REQUESTS": 6, "ALTERNATING": 3,
}  # fmt: skip
LAPS_SD_ESTIMATES = {"ALONE": 12, "MANY": 8, "SETTLING": 4}
_ONE_SPIN = {
    "OTHERS": {}, "BATCHES": (1, 16), "PARTS": (1, 2, None), "CROWDS": (8,), "LOADS": (1.0,), "ANSWERS": (20,),
    "VARIATIONS": {"as fitted": {}}, "SET": {},
}  # fmt: skip
_PAPERS = "jaxspec.bench.papers"


def _small(**settings: Any) -> LLM:
    """An engine as with `_ENGINE`, where no option says so."""
    return LLM(**parse_overrides(_ENGINE.replace("--set", "").split()), **settings)


def _constants(modules: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_PAPERS}.{module}.{name}": value for module in modules.split() for name, value in values.items()}


#: So few places that searches for a knee end at few requests.
ALISE_EXPERIMENT = {
    "FEWER": {"alpaca": 0.03, "sharegpt": 0.03}, "LIMIT": 0.045, "LOADS": (0.5, 1.0, 1.1, 1.2), "MODELS": {},
    "OTHERS": {"pythia-12b": ("pythia-12b", 1)}, "TABLE_3": {"alpaca": 4.0},
}  # fmt: skip

_FEW_SERVED = _constants("alise.predictors", {"SERVED": 20, "ASKED": 30, "PROMPTS": 20}) | {
    "jaxspec.predict.build.load_encoder": lambda source: SentenceEncoder.load(str(GOLDEN / "encoder")),
}


@dataclass(frozen=True)
class Run:
    """Commands that begin with `called` and have the options `with_`, and what makes them small."""

    called: str
    #: Options appended.
    more: str = ""
    with_: tuple[str, ...] = ()
    #: The grids of the papers' experiments have no options: constants by their full names, and their values here.
    constants: Mapping[str, Any] = field(default_factory=dict)
    #: Needs more than a second or two, or the real model.
    slow: bool = True


RUNS = (
    # docs/train.md makes its own model.
    Run("jaxspec.train_predictor.tiny_model", " --steps 150"),
    Run("jaxspec.train_predictor.collect", _ENGINE + " --limit 120 --temperature 0 --max-tokens 70", with_=("tiny",)),
    Run("jaxspec.train_predictor.probe", " --steps 4 --longest 64", with_=("tiny",)),
    Run("jaxspec.train_predictor", _TRAIN.replace("{model}", "tiny"), with_=("target=tiny",)),
    Run("jaxspec.draft.distill", _DISTILL, with_=("target=tiny",)),
    Run("jaxspec.serve", _FEWER, with_=("tiny",)),
    Run("jaxspec.serve --draft suffix --draft smollm2-eagle", _ENGINE),  # the drafters fit the real model only
    Run("jaxspec.serve --config configs/laps_sd.yaml", _TINY + " --set predictor_model=smollm2-length"),
    Run("jaxspec.serve --draft truncated:15", " --model {model}" + _FEWER),
    Run("jaxspec.serve", _TINY),
    Run("jaxspec.bench serve", _LOAD + " --search-tokens 20", with_=("--slo-mix",), slow=False),
    Run("jaxspec.bench serve", _LOAD, slow=False),
    Run("jaxspec.bench offline", _TINY + _FEW),
    Run("jaxspec.bench compare", _ENGINE + " --set model={model} --set predictor=none --repeats 1" + _FEW,
        with_=("--request-rate",)),
    Run("jaxspec.bench compare", _ENGINE + " --set model={model} --repeats 1 --concurrency 2" + _FEW),
    # The drafter of the preset with trees fits the real model only.
    Run("jaxspec.bench constrained",
        _ENGINE + " --set model={model} --set draft=[ngram] --repeats 1 --concurrency 2 --max-tokens 4"),
    Run("jaxspec.bench record", " --model {model}" + _FEWER + _RECORDED),
    Run("jaxspec.bench kernels", " --compilers {compiler} --tokens 1 --contexts 32 --requests 1 --repeats 1",
        with_=("--compilers",)),  # those of the page need not be here
    Run("jaxspec.bench kernels", " --tokens 1 --contexts 32 --requests 1 --repeats 1"),
    Run("jaxspec.bench gpu", " --model tiny --interpret --cells rate", slow=False),
    Run(
        "jaxspec.bench kv",
        " --model {model} --tokens 60 --context 30 --chunk 10 --requests 2 --committed 40 --pages 1 --repeats 1",
    ),
    Run("jaxspec.bench profile", _TINY),
    Run("jaxspec.bench startup", _TINY + " --repeats 1"),
    Run("jaxspec.bench chaos", " --scenarios 1 --requests 20", with_=("--scenarios",)),
    Run("jaxspec.bench chaos", " --live 3 --clients 2", with_=("--live",)),
    Run("jaxspec.bench fuzz", " --bodies 30", with_=("--bodies",)),
    Run("jaxspec.bench fuzz", " --files 5", with_=("--files",)),
    Run("jaxspec.bench overload",
        " --base-url {url} --seconds 0.5 --phase-seconds 1 --concurrency 2 --max-tokens 4 --streams 4"),
    Run("jaxspec.bench router", " --model {model} --requests 20 --prompt-tokens 40", slow=False),
    Run("jaxspec.bench scheduler", " --waiting 20 --iterations 20 --drafting 4", slow=False),
    Run("jaxspec.bench orders",
        _TINY + " --set predictor_model=smollm2-length --engine-jobs 3 --engine-turns 2 --engine-tokens 8",
        with_=("--engine",)),
    Run("jaxspec.bench orders", " --seeds 2 --num-requests 12 --loads 1 --arrivals poisson" + _HERE),
    Run("jaxspec.bench simulate-gpu", " --seeds 2" + _HERE,
        constants=_constants("gpu", {"BATCHES": (4,), "CONTEXTS": (512,), "WORSE": (), "MEASURED": 16, "LEAST": 64})),
    Run("jaxspec.bench routing", " --seeds 2 --replicas 1 2 --each 3 --more 3 --long 4" + _HERE,
        constants=_constants("routing", {"SOME": 2, "FEW": 2, "TOGETHER": 2})),
    Run("jaxspec.bench simulate", " --num-requests 20", with_=("--config",), slow=False),
    Run("jaxspec.bench simulate", " --num-requests 10", with_=("--replicas",), slow=False),
    Run("jaxspec.bench simulate", " --trace FILE.csv", slow=False),
    # Without a file it is the predictor of the model, and the tiny one has none.
    Run("jaxspec.bench predictor", _TRAIN + _SERVED + " --engine smollm2-length", with_=("--engine", "--modes"),
        constants={"jaxspec.llm.LLM": _small}),  # its `--set` is about the training
    Run("jaxspec.bench predictor", _TRAIN + _SERVED, with_=("--engine",), constants={"jaxspec.llm.LLM": _small}),
    Run("jaxspec.bench predictor", _TRAIN, with_=("--retrieval", "trained/folder/folder-length.safetensors"),
        constants=_FEW_SERVED),  # on the answers that the page's first command collected from the tiny model
    Run("jaxspec.bench predictor", _TRAIN + " --set target=smollm2-135m", with_=("--retrieval",),
        constants=_FEW_SERVED),
    Run("jaxspec.bench predictor", _TRAIN + " --formulations reg_l1 --repeats 1"),
    Run("jaxspec.bench paper ssjf", _TINY + " --engine-jobs 4 --engine-scale 0.05 --engine-rate 500 --repeats 1",
        with_=("--engine",)),
    Run("jaxspec.bench paper ssjf", " --seeds 2" + _HERE, constants=_constants("ssjf.experiment", _ONE_LOAD)),
    Run("jaxspec.bench paper laps_sd", _TINY + " --engine-jobs 3 --engine-tokens 8 --repeats 1", with_=("--engine",)),
    Run("jaxspec.bench paper laps_sd", " --seeds 2" + _HERE, constants=_constants("laps_sd.grids", LAPS_SD_GRIDS)
        | _constants("laps_sd.experiment", LAPS_SD_ESTIMATES)),
    Run(
        "jaxspec.bench paper alise",
        _TINY + " --engine-jobs 4 --engine-tokens 20 --engine-kv 256 --engine-rate 500 --repeats 1",
        with_=("--engine",),
    ),
    Run("jaxspec.bench paper alise", " --minutes 0.05 --seeds 2" + _HERE,
        constants=_constants("alise.experiment", ALISE_EXPERIMENT) | _constants("alise.cases", {"CONCURRENCY": 8})),
    Run("jaxspec.bench paper adaserve", _TINY + " --set draft=[ngram]" + _KEPT, with_=("--engine",)),
    Run("jaxspec.bench paper adaserve", " --quick --seeds 1 --minutes 0.05" + _HERE,
        constants=_constants("adaserve.cases", {"WRITTEN": 16})),
    # The drafters of the package, which take turns there, fit the real model only.
    Run("jaxspec.bench paper spin", " --model {model} --set draft=[ngram,truncated:1,truncated:15]" + _FEWER + _TURN,
        with_=("--engine",)),
    Run("jaxspec.bench paper spin", " --model {model} --batches 2 --drafts 2 --rows 1 --runs 1 --repeats 1",
        with_=("--verification",)),
    Run("jaxspec.bench paper spin", " --model {model}" + _FEWER + _PIPELINE,
        with_=("--pipeline",)),
    Run("jaxspec.bench paper spin", " --jobs 4 --seeds 2" + _HERE, constants=_constants("spin.simulation", _ONE_SPIN)),
    Run("jaxspec.draft.distill", " --set target={model}" + _DISTILL),
    Run("jaxspec.train_predictor.collect", _TINY + " --max-tokens 16"),
    Run("jaxspec.train_predictor.probe", " --target {model} --steps 4 --longest 64"),
    Run("jaxspec.train_predictor.continuations",
        " --target {model} --each 2 --limit 2 --max-tokens 40 --set max_num_seqs=4" + _ENGINE,
        constants={"jaxspec.train_predictor.continuations.SHORT": 1}),
    Run("jaxspec.train_predictor.predictions", " --set target={model} --set encoder={encoder} --set test=0.3"),
    Run("jaxspec.train_predictor", _TRAIN),
)  # fmt: skip

#: Pages whose commands build on each other: they are run one after the other in one folder.
SEQUENCES = frozenset({"docs/distill.md", "docs/predictor.md", "docs/train.md", "examples/own_model.py"})
#: Of those, the pages that need no file but the presets.
FROM_NOTHING = frozenset({"docs/train.md"})

#: Commands that are not run as they are, by what they begin with, and why. What is looked at instead stands in
#: `test_docs.py`: targets and variables of make, options of what they start, extras of pip.
CHECKED = {
    "python docs/make_api.py": "test_api_page.py compares its page with the committed one",
    "make serve": "it installs, perhaps another Python or CUDA; what it starts then is run with the other commands",
    "make test": "it is what runs these tests",
    "make test-fast": "the same",
    "make test-families": "it takes ten minutes; .ci/run does it",
    "make test-ray": "it downloads Ray; .ci/run does it",
    "serve run": "it needs Ray; make test-ray builds the applications of all configs",
    "ray start": "it needs Ray",
    "source .venv/bin/activate": "it changes a shell",
    "make test-gpu-compile": "it downloads JAX's CUDA plugin; .ci/run does it",
    "make test-ui": "it needs Chromium; .ci/run does it",
    "make test-sanitize": "it compiles the kernels for a minute and runs their tests for some more",
    "make audit": "it asks an index for advisories",
    "make screenshot": "it needs Chromium and starts the real model",
    "make lint": "it installs the linters and checks the whole checkout; .ci/run does it",
    "make install": "it changes what the tests run in",
    "make format": "it rewrites the checkout",
    "make gpu-check": "it needs an NVIDIA GPU",
    "docker": "it needs Docker",
    "make bench-peers": "it downloads and compiles other engines",
    "jaxspec.bench peers --peers llama.cpp vllm --json peers.json": "it needs other engines",
    "jaxspec.bench peers --peers vllm --scenarios decode-1 decode-16 prefill-1024 --json bf16.json": "it needs vLLM",
    "pip install": "it changes what the tests run in",
    "pre-commit install": "it changes the checkout's hooks",
    ".ci/run": "it is lint and tests again",
}

#: Commands with a test of their own, in `test_docs_server.py`, `test_docs.py` and `test_examples.py`.
OWN_TESTS = {
    "curl": "it is sent to the live server",
    "make help": "it is run, and lists the targets",
    **{f"python examples/{name}.py": "it is run" for name in ("serve", "offline", "simulate", "own_model")},
}

#: First lines of blocks that hold something else.
NO_COMMANDS = {
    ("README.md", "jaxspec/            the engine and everything that uses it"),
    ("docs/architecture.md", "jaxspec.serve, jaxspec.bench, jaxspec.llm  →  jaxspec.engine  →  jaxspec.draft  →  "
     "jaxspec.step  →  jaxspec.models"),
    ("docs/models.md", '"olmo2": Family('),
}  # fmt: skip
