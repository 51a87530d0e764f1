"""What a run of the fault harness serves: random settings, and random requests with a client each."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.slo import Slo
from jaxspec.sched.slots import BATCHINGS, DRAFT_CHOICES, MEMORIES, ORDERS, PACES, TREES
from jaxspec.structured_outputs import StructuredOutputs

#: Sets of drafters: without a model, with a small one, and with several.
DRAFTERS = ((), ("suffix",), ("ngram",), ("truncated:1",), ("grammar", "suffix"), ("suffix", "truncated:1"))
#: Few sizes of programs, so that most are in JAX's cache.
SEATS, BUDGETS, POOLS = (2, 5), (8, 24), (7, 24)
PAGE, CONTEXT = 16, 96
#: Settings that need a second device.
PLACEMENTS = ("draft_devices", "micro_batches", "draft_turns", "tensor_parallel_size")
#: Prompts begin with one of these many prefixes.
PREFIXES = 5
#: Kinds of structured output that a byte-level vocabulary can write in a few tokens.
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{2,8}"}, {"choice": ["yes", "no", "perhaps"]}, {"json": {"type": "integer"}},
    {"grammar": 'start: "a" ("b" | "c")+ "d"'}, {"regex": "(ab|cd)*"},
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request apart from its client. `params` have a seed, so its answer depends on nothing else."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def random(self) -> bool:
        """Whether tokens are sampled instead of chosen greedily."""
        return not self.params.greedy


@dataclass(frozen=True)
class Client:
    """What a client does with its request. Counts are of its deltas: None never.

    cancels: after this many deltas; 0 at once. cancels_at: this many turns after it was sent. raises: its callback
    fails at this delta. poisonous: the step fails whenever the request is in it, after this many of its tokens.
    """

    cancels: int | None = None
    cancels_at: int | None = None
    raises: int | None = None
    poisonous: int | None = None

    @property
    def stays(self) -> bool:
        """Whether it should get the whole answer."""
        return self == Client()


@dataclass(frozen=True)
class Scenario:
    """An engine's settings, and how often what fails. `gap`: turns between two injected failures at least."""

    settings: dict[str, Any]
    #: Probability of a failure per turn, of a jump of the clock, and of a client that does not stay.
    fails: float
    jumps: float
    leaves: float
    poison: float
    gap: int = 8
    #: Whether outputs depend on neither batch nor drafts; not with INT8 KV.
    exact: bool = True
    #: The same for sampled outputs; not with rejection sampling.
    exact_samples: bool = True
    #: Whether length predictions come, late and wrong.
    predicts: bool = field(default=False)


def draw_settings(random: Random) -> dict[str, Any]:
    """Settings of an engine. Not all combinations are valid: draw again after a `ValueError`."""
    order = random.choice(ORDERS.names)
    preempts = ORDERS[order].preempts(ORDERS.section_of(PolicyConfig(order=order)))
    batchings = [name for name in BATCHINGS.names if not (preempts and BATCHINGS[name].runs_to_end)]
    drafters = random.choice(DRAFTERS)
    tree = random.choice(TREES.names) if drafters else "auto"
    chosen: dict[str, Any] = {
        "order": order, "batching": random.choice(batchings), "memory": random.choice(MEMORIES.names),
        "pace": random.choice(PACES.names), "prefill": random.choice(("mixed", "mixed", "first")),
        "predictor": random.choice(("none", "oracle", "noisy_oracle")), "draft": list(drafters) or "none", "tree": tree,
        "max_batch_size": random.randint(1, 4), "batch_wait_timeout_ms": random.choice((1.0, 50.0)),
        "aging_ms": random.choice((None, None, 20.0, 500.0)), "las": {"quantum_ms": random.choice((0.0, 5.0))},
        "laps_sd": {"first_threshold_ms": random.choice((2.0, 50.0)), "window": 3, "queues": 4},
        "alise": {"queues": 4, "first_threshold_ms": random.choice((5.0, 50.0))},
        "enable_prefix_caching": random.random() < 0.8, "async_scheduling": random.random() < 0.3,
        "max_num_seqs": random.choice(SEATS), "max_num_batched_tokens": random.choice(BUDGETS),
        "kv_cache_tokens": PAGE * random.choice(POOLS),
        "swap_space": random.choice((0.0, 1e-5, 1e-4, 1e-3)), "swap_dtype": "same", "page_size": PAGE,
        "kv_cache_dtype": "int8" if random.random() < 0.08 else "auto", "max_model_len": CONTEXT,
        "policy_seed": random.randrange(100), "compile_in_background": False, "compilation_cache_dir": "",
        "token_buckets": [1, 8], "max_queued_requests": 10_000,
    }  # fmt: skip
    if drafters:
        chosen["draft_depth"] = random.choice((1, 3, None))
        if len(drafters) > 1:
            chosen["draft_choice"] = random.choice(DRAFT_CHOICES.names)
        if TREES[tree].sampled_widths is not None and random.random() < 0.3:
            chosen["acceptance"] = "rejection"
    return chosen


def place(settings: dict[str, Any], random: Random, devices: int) -> None:
    """Draw what needs a second device into the settings: draft models on a device of their own, with micro-batches or
    turns, or everything split over two. Without a second device nothing is drawn."""
    if devices < 2:
        return
    models = [name for name in settings["draft"] if name.startswith("truncated")] if settings["draft"] != "none" else []
    if models and random.random() < 0.6:
        settings["draft_devices"] = dict.fromkeys(models, 1)
        settings["micro_batches"] = random.choice((None, 1, 2, 3))
        settings["draft_turns"] = random.choice((None, False, True))
        settings.pop("acceptance", None)  # rejection sampling needs the drafter on the target's device
    elif random.random() < 0.2:
        # Programs of their own, which take long to compile: few shapes.
        settings |= {"tensor_parallel_size": 2, "max_num_batched_tokens": BUDGETS[0], "max_num_seqs": SEATS[0]}


def draw(random: Random, places: Random, devices: int = 1) -> Scenario:
    """A scenario. `places`: for what needs one of several `devices`, so that the rest is the same without them."""
    settings = draw_settings(random)
    place(settings, places, devices)
    return Scenario(
        settings,
        fails=random.choice((0.0, 0.01, 0.05)),
        jumps=random.choice((0.0, 0.01)),
        leaves=random.choice((0.1, 0.4)),
        poison=random.choice((0.0, 0.0, 0.01)),
        exact=settings["kv_cache_dtype"] == "auto",
        exact_samples=settings.get("acceptance") != "rejection",
        predicts=random.random() < 0.5,
    )


def draw_client(random: Random, scenario: Scenario) -> Client:
    """What a client does."""
    if random.random() < scenario.poison:
        return Client(poisonous=random.randint(0, 6))
    if random.random() >= scenario.leaves:
        return Client()
    way = random.choice(("cancels", "cancels", "cancels_at", "cancels_at", "raises"))
    return Client(**{way: random.randint(0, 8) if way != "cancels_at" else random.randint(0, 60)})


def draw_asked(random: Random, end: int) -> Asked:
    """A request. `end`: the model's end token, not part of prompts."""
    prefix = random.randrange(PREFIXES)
    text = [(7 * prefix + 3 * i) % end for i in range(random.choice((0, 0, 8, 16, 32)))]
    text += [random.randrange(end) for _ in range(random.randint(1, 12))]
    if random.random() < 0.3:  # something to draft from
        text = (text[-6:] * 6)[:40]
    most = random.choice((1, 2, 5, 9, 14, 20))
    given: dict[str, Any] = {"max_tokens": most, "seed": random.randrange(2**40), "ignore_eos": random.random() < 0.7}
    given["temperature"] = random.choice((0.0, 0.0, 0.0, 0.7, 1.2))
    if random.random() < 0.3:
        given |= {"top_p": random.choice((0.8, 1.0)), "top_k": random.choice((0, 5)), "min_p": random.choice((0, 0.05))}
    if random.random() < 0.2:
        given |= {
            "presence_penalty": random.choice((0.0, 1.5)), "frequency_penalty": random.choice((0.0, 0.5)),
            "repetition_penalty": random.choice((1.0, 1.3)), "logit_bias": random.choice(({}, {7: 4.0, 200: -50.0})),
        }  # fmt: skip
    if random.random() < 0.1:
        given["structured_outputs"] = StructuredOutputs(**random.choice(STRUCTURES))
    elif random.random() < 0.1:
        given |= {"stop": [random.choice(("a", "the", "\n", "é"))], "include_stop_str_in_output": random.random() < 0.5}
    elif random.random() < 0.05:
        given["allowed_token_ids"] = sorted(random.sample(range(end), 20))
    elif random.random() < 0.05:
        given["min_tokens"] = most
        given["ignore_eos"] = False
    if random.random() < 0.15:
        given["logprobs"] = random.choice((0, 3))
    if random.random() < 0.05:
        given["prompt_logprobs"] = 1
    return Asked(tuple(text), SamplingParams(**given))


def draw_slo(random: Random) -> Slo | None:
    """An SLO: none, one that can be met, or one that cannot always."""
    return random.choice((None, None, Slo(tpot=0.5), Slo(tpot=0.02, ttft=0.2), Slo(tpot=0.008)))
