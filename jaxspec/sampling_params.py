"""Sampling parameters of a request, and their validation. Pure Python: server, engine and step use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Integral

from jaxspec.chat.reasoning import Reasoning
from jaxspec.errors import InvalidRequest
from jaxspec.structured_outputs import StructuredOutputs

MAX_LOGPROBS, MAX_BAD_WORDS = 20, 256
#: A temperature below this means greedy decoding.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters with OpenAI's names and vLLM's extensions.

    Raises `InvalidRequest` (a `ValueError`) naming the field that is out of range.
    """

    #: 0 to 100; 0: greedy.
    temperature: float = 1.0
    #: Sample from the smallest set of most likely tokens whose probabilities add up to this; above 0, at most 1.
    top_p: float = 1.0
    #: Sample from this many most likely tokens. 0 or -1: no limit.
    top_k: int = 0
    #: Sample only tokens at least this likely, relative to the most likely one; 0 to 1.
    min_p: float = 0.0
    #: Subtracted from the logits of generated tokens; -2 to 2.
    presence_penalty: float = 0.0
    #: Subtracted from the logits of generated tokens, once for each time they occurred; -2 to 2.
    frequency_penalty: float = 0.0
    #: Divides positive and multiplies negative logits of prompt and generated tokens, as in vLLM; above 0.
    repetition_penalty: float = 1.0
    #: Token id -> number added to its logit, -100 to 100.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    #: Seed of the sampling, 64 bits: the same seed gives the same output. None: the engine draws one by its `seed`.
    seed: int | None = None
    #: Outputs per prompt, 1 to 128; output i uses the seed plus i.
    n: int = 1
    #: Output tokens at most. None: what the context leaves.
    max_tokens: int | None = 16
    #: Up to 16 strings that end the output.
    stop: Sequence[str] = ()
    #: Token ids that end the output, besides the model's end tokens.
    stop_token_ids: Sequence[int] = ()
    #: Whether the output goes on after an end token.
    ignore_eos: bool = False
    #: Whether the text includes the stop string, or the text of the token that ended the output.
    include_stop_str_in_output: bool = False
    #: Whether control tokens are left out of the text.
    skip_special_tokens: bool = True
    #: Return log-probabilities of each sampled token and of this many most likely tokens, 0 to 20, from the unmodified
    #: distribution.
    logprobs: int | None = None
    #: Likewise for every prompt token but the first.
    prompt_logprobs: int | None = None
    #: Output tokens before which neither an end token nor a stop string ends the output.
    min_tokens: int = 0
    #: Token ids that may be sampled. None: all.
    allowed_token_ids: Sequence[int] | None = None
    #: Texts that are not generated, however they are split into the tokens that the tokenizer gives for them.
    bad_words: Sequence[str] = ()
    #: What the output must match, after its reasoning.
    structured_outputs: StructuredOutputs | None = None
    #: How the output begins; the chat interfaces set it. None: the output has no reasoning part.
    reasoning: Reasoning | None = None
    #: Tokens of reasoning after which it must end.
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))

        def check(name: str, ok: bool, rule: str) -> None:
            if not ok:
                raise InvalidRequest(name, f"{name} must be {rule}, got {getattr(self, name)!r:.200}")

        def within(name: str, low: float, high: float) -> None:
            value = getattr(self, name)
            check(name, isfinite(value) and low <= value <= high, f"between {low:g} and {high:g}")

        within("temperature", 0, 100)
        check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        check("top_k", -1 <= self.top_k < 2**31, "0 (no limit) or positive, below 2³¹")
        within("min_p", 0, 1)
        within("presence_penalty", -2, 2)
        within("frequency_penalty", -2, 2)
        within("repetition_penalty", 1e-4, 1e4)  # what float32 holds, with room for logits
        check(
            "logit_bias",
            all(isfinite(b) and -100 <= b <= 100 for b in self.logit_bias.values()),
            "between -100 and 100",
        )
        check("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer")
        check("n", 1 <= self.n <= 128, "between 1 and 128")
        check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        check(
            "stop",
            len(self.stop) <= 16 and all(isinstance(s, str) and s for s in self.stop),
            "up to 16 non-empty strings",
        )
        check("min_tokens", self.min_tokens >= 0, "at least 0")
        check(
            "min_tokens", self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"at most max_tokens ({self.max_tokens})",
        )  # fmt: skip
        check("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "non-empty")
        check(
            "bad_words",
            not isinstance(self.bad_words, str)
            and len(self.bad_words) <= MAX_BAD_WORDS
            and all(isinstance(word, str) and word.strip() for word in self.bad_words),
            f"up to {MAX_BAD_WORDS} strings that are not blank",
        )
        budget = self.thinking_token_budget
        check("thinking_token_budget", budget is None or 0 <= budget < 2**31, "0 or positive, below 2³¹")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(name, value is None or 0 <= value <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with another seed, wrapped to 64 bits: the i-th of n outputs uses seed + i."""
        return replace(self, seed=seed % 2**64)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether logits are modified by penalties or a bias."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1 or self.logit_bias)

    @property
    def constrained(self) -> bool:
        """Whether some tokens must not be sampled."""
        budgeted = self.reasoning is not None and self.thinking_token_budget is not None
        return bool(self.min_tokens or self.allowed_token_ids or self.bad_words or self.structured_outputs or budgeted)


def check_tokens(name: str, ids: Iterable[int], vocab: int) -> None:
    """Raises `InvalidRequest` naming the field if not all are token ids of a vocabulary of `vocab` tokens."""
    if not all(isinstance(t, Integral) and 0 <= t < vocab for t in ids):
        raise InvalidRequest(name, f"{name} token ids must be between 0 and {vocab - 1}")


def check_request(prompt_ids: Sequence[int], params: SamplingParams, vocab: int, max_model_len: int) -> int:
    """The most tokens that the request may generate: `max_tokens`, or else what the context leaves.

    `vocab` is the size of the vocabulary. Raises `InvalidRequest` if prompt or params do not fit the model.
    """
    n = len(prompt_ids)
    of_vocabulary = (
        ("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    )  # fmt: skip
    for name, ids in (("prompt", prompt_ids), *of_vocabulary):
        if not all(isinstance(t, Integral) for t in ids):
            raise InvalidRequest(name, f"{name} must hold token ids, which are integers")
    if n == 0:
        raise InvalidRequest("prompt", "the prompt is empty")
    if n >= max_model_len:
        raise InvalidRequest("prompt", f"the prompt has {n} tokens, the context length is {max_model_len}")
    if not all(0 <= t < vocab for t in prompt_ids):
        raise InvalidRequest("prompt", f"prompt token ids must be between 0 and {vocab - 1}")
    if params.max_tokens is not None and n + params.max_tokens > max_model_len:
        raise InvalidRequest(
            "max_tokens",
            f"prompt ({n} tokens) and max_tokens ({params.max_tokens}) exceed the context length of {max_model_len}",
        )
    for name, ids in of_vocabulary:
        check_tokens(name, ids, vocab)
    return params.max_tokens or max_model_len - n
