"""How each command of the pages is run at a small size, and which ones are only read.

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
_ONE_PRODUCT = " --formats Q4_1 --tokens 1 --contexts 32 --requests 1 --repeats 1"
_PIPELINE = " --pipeline-concurrency 2 --pipeline-tokens 4 --pipeline-levels 2 --repeats 1"
#: Few steps of a predictor's training; the tiny encoder reads 48 tokens.
_TRAIN = (
    " --set target={model} --set encoder={encoder} --set longest=32 --set layers=1 --set test=0.3 --set batch=8"
    " --set steps=2 --set head_steps=2 --set every=2 --set warmup=1"
)
_DISTILL = " --set steps=2 --set every=2 --set longest=64 --set batch=2"
_SERVED = " --jobs 2 --turns 1 --max-tokens 4 --modes continuous --request-rate 500"
_HERE = " --processes 1 --keep keep"
_PAPERS = "jaxspec.bench.papers"


def _small(**settings: Any) -> LLM:
    """An engine as with `_ENGINE`, where no option says so."""
    return LLM(**parse_overrides(_ENGINE.replace("--set", "").split()), **settings)


def _constants(modules: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_PAPERS}.{module}.{name}": value for module in modules.split() for name, value in values.items()}


_FEW_SERVED = _constants("alise.predictors", {"SERVED": 20, "ASKED": 30, "PROMPTS": 20}) | {
    "jaxspec.predict.build.load_encoder": lambda source: SentenceEncoder.load(str(GOLDEN / "encoder")),
}


@dataclass(frozen=True)
class Run:
    """Commands that begin with `called` and have the options `with_`, and what makes them small.

    With `by`, a test of the benchmark's own that runs the same command at a small size and looks at what comes out: the
    page's command is then only read, which checks its options.
    """

    called: str
    #: Options appended.
    more: str = ""
    with_: tuple[str, ...] = ()
    #: The grids of the papers' experiments have no options: constants by their full names, and their values here.
    constants: Mapping[str, Any] = field(default_factory=dict)
    #: Needs more than a second or two, or the real model.
    slow: bool = True
    #: Folder/file::test, below `tests/`.
    by: str = ""


RUNS = (
    # docs/train.md makes its own model.
    Run("jaxspec.train_predictor.tiny_model", " --steps 150"),
    Run("jaxspec.train_predictor.collect", _ENGINE + " --limit 120 --temperature 0 --max-tokens 70", with_=("tiny",)),
    Run("jaxspec.train_predictor.probe", " --steps 4 --longest 64", with_=("tiny",)),
    Run("jaxspec.train_predictor", _TRAIN.replace("{model}", "tiny"), with_=("target=tiny",)),
    Run("jaxspec.draft.distill", _DISTILL, with_=("target=tiny",)),
    Run("jaxspec.serve", _FEWER, with_=("tiny",)),
    Run("jaxspec.serve --draft suffix --draft smollm2-eagle", _FEWER),  # the drafters fit the real model only
    Run("jaxspec.serve --config configs/laps_sd.yaml", _TINY + " --set predictor_model=smollm2-length"),
    Run("jaxspec.serve", " --model {model}" + _FEWER, with_=("--draft",)),
    Run("jaxspec.serve", " --model {model}" + _FEWER, with_=("tensor_parallel_size=2",)),
    Run("jaxspec.serve", _TINY),
    Run("jaxspec.bench serve", _LOAD + " --search-tokens 20", with_=("--slo-mix",), slow=False),
    Run("jaxspec.bench serve", _LOAD, slow=False),
    Run("jaxspec.bench offline", _TINY + _FEW),
    Run("jaxspec.bench compare", _ENGINE + " --set model={model} --set predictor=none --repeats 1" + _FEW,
        with_=("--request-rate",)),
    Run("jaxspec.bench compare", with_=("--new-prompts",),
        by="bench/test_compare.py::test_each_turn_has_prompts_of_its_own"),
    Run("jaxspec.bench compare", _ENGINE + " --set model={model} --repeats 1 --concurrency 2" + _FEW),
    Run("jaxspec.bench constrained", by="bench/test_constrained.py::test_constraints_and_engines_take_turns"),
    Run("jaxspec.bench record", " --model {model}" + _FEWER + _RECORDED),
    Run("jaxspec.bench kernels", with_=("--compilers",),
        by="kernels/test_kernels.py::test_the_benchmark_compares_compilers"),
    Run("jaxspec.bench kernels", _ONE_PRODUCT),
    Run("jaxspec.bench gpu", " --model tiny --interpret --cells rate", slow=False),
    Run("jaxspec.bench kv", by="bench/test_bench_kv.py::test_it_measures"),
    Run("jaxspec.bench profile", _TINY),
    Run("jaxspec.bench startup", _TINY + " --repeats 1"),
    Run("jaxspec.bench chaos", with_=("--scenarios",),
        by="bench/test_chaos.py::test_engines_with_failing_parts_give_right_answers"),
    Run("jaxspec.bench chaos", with_=("--ray",),
        by="ray_serve/check_chaos.py::check_replicas_that_fail_lose_no_request"),
    Run("jaxspec.bench chaos", " --live 3 --clients 2", with_=("--live",)),
    Run("jaxspec.bench fuzz", by="bench/test_fuzz.py::test_the_command"),
    Run("jaxspec.bench overload",
        " --base-url {url} --seconds 0.5 --phase-seconds 1 --concurrency 2 --max-tokens 4 --streams 4"),
    Run("jaxspec.bench router", " --model {model} --requests 20 --prompt-tokens 40", slow=False),
    Run("jaxspec.bench scheduler", " --waiting 20 --iterations 20 --drafting 4", slow=False),
    Run("jaxspec.bench orders", with_=("--engine",),
        by="bench/papers/test_orders.py::test_the_main_cells_on_the_engine"),
    Run("jaxspec.bench orders", by="bench/papers/test_orders.py::test_a_small_map"),
    Run("jaxspec.bench simulate-gpu", " --seeds 2" + _HERE,
        constants=_constants("gpu", {"BATCHES": (4,), "CONTEXTS": (512,), "WORSE": (), "MEASURED": 16, "LEAST": 64})),
    Run("jaxspec.bench routing", by="bench/papers/test_routing.py::test_a_small_experiment"),
    Run("jaxspec.bench simulate", " --num-requests 20", with_=("--config",), slow=False),
    Run("jaxspec.bench simulate", " --num-requests 10", with_=("--replicas",), slow=False),
    Run("jaxspec.bench simulate", " --trace FILE.csv", slow=False),
    # Without a file it is the predictor of the model, and the tiny one has none.
    Run("jaxspec.bench predictor", _TRAIN + _SERVED + " --engine smollm2-length", with_=("--engine", "--modes"),
        constants={"jaxspec.llm.LLM": _small}),  # its `--set` is about the training
    Run("jaxspec.bench predictor", _TRAIN + _SERVED, with_=("--engine",), constants={"jaxspec.llm.LLM": _small}),
    Run("jaxspec.bench predictor", _TRAIN, with_=("--retrieval", "trained/folder/folder-length.safetensors"),
        constants=_FEW_SERVED),  # on the answers that the page's first command collected from the tiny model
    Run("jaxspec.bench predictor",
        by="bench/papers/test_predictor_paper.py::test_the_ablation_trains_measures_and_writes_its_page"),
    Run("jaxspec.bench paper ssjf", by="bench/papers/test_papers.py::test_ssjf_simulated_and_then_on_the_engine"),
    Run("jaxspec.bench paper laps_sd", by="bench/papers/test_laps_sd_paper.py::test_simulated_and_then_on_the_engine"),
    Run("jaxspec.bench paper alise", with_=("--engine",),
        by="bench/papers/test_alise_paper.py::test_the_engine_fills_its_columns"),
    Run("jaxspec.bench paper alise", by="bench/papers/test_alise_paper.py::test_the_page_is_written"),
    Run("jaxspec.bench paper adaserve", with_=("--engine",),
        by="bench/papers/test_adaserve_paper.py::test_the_engine_fills_its_columns"),
    Run("jaxspec.bench paper adaserve", by="bench/papers/test_adaserve_paper.py::test_the_page_is_written"),
    Run("jaxspec.bench paper spin", with_=("--engine",),
        by="bench/papers/test_spin_engine.py::test_contenders_take_turns_on_one_engine"),
    Run("jaxspec.bench paper spin", with_=("--verification",),
        by="bench/papers/test_spin_verification.py::test_it_measures_and_makes_a_page"),
    Run("jaxspec.bench paper spin", " --model {model}" + _FEWER + _PIPELINE,
        with_=("--pipeline",)),
    Run("jaxspec.bench paper spin", by="bench/papers/test_spin_paper.py::test_the_page_is_written"),
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
    "jaxspec.bench peers --peers llama.cpp vllm --scenarios decode-1 decode-16 prefill-1024 loaded --json peers.json": (
        "it needs other engines"
    ),
    "jaxspec.bench peers --peers vllm --scenarios decode-1 decode-16 prefill-1024 --json bf16.json": "it needs vLLM",
    "jaxspec.bench peers --peers vllm --scenarios prefill-4096 sample-16 --prefill 4096 --repeats 3": "it needs vLLM",
    "jaxspec.bench peers --peers vllm --scenarios prefill-4096 sample-1 sample-16 --prefill 4096": "it needs vLLM",
    "jaxspec.bench peers --peers vllm --scenarios prefill-1024 prefill-4096": "it needs vLLM",
    "jaxspec.bench peers --peers vllm --scenarios decode-1 decode-16 prefill-1024 --repeats 5": "it needs vLLM",
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
