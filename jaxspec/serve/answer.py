"""Builds OpenAI response objects from the engine's output deltas: one complete object, or chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.outputs import OutputDelta, RequestMetrics, SpeculationCounts, TokenLogprob
from jaxspec.serve.attainment import attainment, timings
from jaxspec.serve.errors import ApiError

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer

Json = dict[str, Any]
#: Stands for a log-probability of minus infinity, which JSON cannot represent.
MIN_LOGPROB = -9999.0


@dataclass(slots=True)
class Choice:
    """State of one entry of the response's `choices`. `text` and `logprobs` are filled for complete responses only."""

    index: int
    prompt: Sequence[int]
    text: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    #: `prompt_logprobs` of the response.
    prompt_logprobs: list[Json | None] | None = None
    #: Whether `_opening` has been written.
    opened: bool = False
    #: Output tokens so far.
    tokens: int = 0
    #: Character offset of the next token's text.
    offset: int = 0
    #: Set when the sequence has finished.
    metrics: RequestMetrics | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def kv_quantized(self) -> bool:
        return self.metrics is not None and self.metrics.kv_quantized


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What a response has besides its text.

    n: consecutive choices that share a prompt. usage_chunk: a stream ends with a chunk that has the usage.
    running_usage: every chunk has it. drafting: `metrics` include speculation counts. predictions: they include the
    predicted number of output tokens. token_ids: of prompt and outputs. tokens_as_ids: log-probabilities name tokens by
    id. prompt_logprobs: of every prompt token. drafted: a stream has a chunk for each token, which says whether it was
    an accepted draft.
    """

    n: int = 1
    usage_chunk: bool = False
    running_usage: bool = False
    drafting: bool = False
    predictions: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: bool = False
    drafted: bool = False


PLAIN = AnswerForm()


class Answer(ABC):
    """Builds the response to one HTTP request. `prompts[i]` holds the token ids of choice i's prompt."""

    #: What a stream ends with.
    end: ClassVar[bytes] = b"data: [DONE]\n\n"
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        id: str,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        form: AnswerForm = PLAIN,
    ) -> None:
        self.choices = [Choice(i, p) for i, p in enumerate(prompts)]
        self._head = {"id": id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._form = form
        self._speculation = SpeculationCounts() if form.drafting else None

    def whole(self) -> Json:
        """The complete response, once `gather` has received every delta."""
        choices = [self._choice(c) for c in self.choices]
        return {"object": self.whole_object, **self._head, "choices": choices, "usage": self.usage(), **self._metrics()}

    def usage(self) -> Json:
        """OpenAI's `usage`, in tokens. A prompt with several choices counts once."""
        prompt = sum(len(c.prompt) for c in self.choices[:: self._form.n])
        completion = sum(c.tokens for c in self.choices)
        cached = sum(c.metrics.cached_tokens for c in self.choices[:: self._form.n] if c.metrics)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _metrics(self) -> Json:
        """The `metrics` field over all choices: an extension, which OpenAI's clients pass through."""
        metrics: Json = {}
        finished = [c.metrics for c in self.choices if c.metrics is not None]
        if (counts := self._speculation) is not None:
            metrics["speculative_decoding"] = {
                "proposed": counts.proposed,
                "accepted": counts.accepted,
                "accepted_per_position": counts.by_level,
                "mean_accepted_length": counts.mean_accepted_length,
            }
        if self._form.predictions:
            # Comparable with usage.completion_tokens only if every choice has a prediction.
            known = [m.predicted_tokens for m in finished if m.predicted_tokens is not None]
            metrics["predicted_tokens"] = round(sum(known)) if len(known) == len(self.choices) else None
            # Quantiles of a sum are not the sum of quantiles: they are given for a single choice only.
            single = finished[0].predicted_quantiles if len(self.choices) == len(finished) == 1 else None
            median, high = single or (None, None)
            metrics["predicted_tokens_p50"] = None if median is None else round(median)
            metrics["predicted_tokens_p90"] = None if high is None else round(high)
        if any(c.kv_quantized for c in self.choices):
            metrics["kv_quantized"] = True
        if any(m.slo for m in finished):
            metrics["slo"] = attainment(finished)
        out: Json = {"timings": timings(finished)} if finished else {}
        return {"metrics": metrics, **out} if metrics else out

    def gather(self, index: int, delta: OutputDelta) -> None:
        """Add a delta to the response that `whole` returns."""
        choice = self.choices[index]
        self._count(choice, delta)
        choice.text.append(delta.text)
        if self._form.token_ids:
            choice.ids += delta.token_ids
        if delta.logprobs:
            choice.logprobs.append(self._logprobs(choice, delta.logprobs))

    def chunks(self, index: int, delta: OutputDelta) -> list[Json]:
        """The stream chunks for a delta; empty if it has no visible output yet."""
        choice = self.choices[index]
        parts = delta.by_token() if self._form.drafted else (delta,)
        return [chunk for part in parts for chunk in self._chunks_of(choice, part)]

    def _chunks_of(self, choice: Choice, delta: OutputDelta) -> list[Json]:
        self._count(choice, delta)
        first = not choice.opened
        out = self._opening(choice, delta) if first else []
        choice.opened = True
        extras: Json = {"logprobs": self._logprobs(choice, delta.logprobs)} if delta.logprobs else {}
        if self._form.token_ids and delta.token_ids:
            extras["token_ids"] = list(delta.token_ids)
        if self._form.drafted and delta.token_ids:
            extras["draft"] = delta.drafted[0]
        pieces = self._pieces(choice, delta)
        if extras:
            pieces = pieces or [self._piece(choice, "", None)]
            pieces[0] |= extras
        out += pieces
        if choice.finish_reason is not None:
            out.append(self._ending(choice))
        chunks = [self._chunk([piece]) for piece in out]
        if first and chunks:
            chunks[0] |= self._of_prompt(choice)
        if choice.finish_reason is not None and choice.kv_quantized and not self._form.usage_chunk:
            chunks[-1]["metrics"] = {"kv_quantized": True}  # always reported, because the output may not be exact
        return chunks

    def last_chunks(self) -> list[Json]:
        """The chunk with usage and metrics that ends a stream, if the client requested it."""
        return [self._chunk([]) | {"usage": self.usage()} | self._metrics()] if self._form.usage_chunk else []

    def failed(self, error: ApiError) -> list[Json]:
        """The last events of a stream that fails."""
        return [error.body]

    def _pieces(self, choice: Choice, delta: OutputDelta) -> list[Json]:
        """The choice objects with the delta's text; empty if it has none to show yet."""
        return [self._piece(choice, delta.text, None)] if delta.text else []

    def _count(self, choice: Choice, delta: OutputDelta) -> None:
        choice.tokens += len(delta.token_ids)
        if self._form.prompt_logprobs and delta.prompt_logprobs is not None:
            choice.prompt_logprobs = [None if e is None else self._ranked(e) for e in delta.prompt_logprobs]
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            if delta.metrics is not None:
                choice.metrics = delta.metrics
                if self._speculation is not None:
                    self._speculation.merge(delta.metrics.speculation)

    def _ranked(self, entry: TokenLogprob) -> Json:
        """vLLM's form of a prompt token's log-probabilities: by token id, the token's own first."""
        found = {entry.token_id: entry.logprob} | dict(entry.top)
        return {
            str(id): {"logprob": max(logprob, MIN_LOGPROB), "decoded_token": self._tokenizer.token_text(id)}
            for id, logprob in found.items()
        }

    def _of_prompt(self, choice: Choice) -> Json:
        """Token ids and log-probabilities of the choice's prompt, if the request wants them."""
        out: Json = {"prompt_token_ids": list(choice.prompt)} if self._form.token_ids else {}
        if self._form.prompt_logprobs:
            out["prompt_logprobs"] = choice.prompt_logprobs
        return out

    def _of_output(self, choice: Choice) -> Json:
        """Token ids of a complete choice, if the request wants them."""
        return {"token_ids": choice.ids} if self._form.token_ids else {}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if self._form.usage_chunk or self._form.running_usage:
            chunk["usage"] = self.usage() if self._form.running_usage else None
        return chunk

    def _token(self, id: int) -> str:
        """The token's text, or OpenAI's `bytes:` notation if its bytes are not valid UTF-8."""
        if self._form.tokens_as_ids:
            return f"token_id:{id}"
        raw = self._tokenizer.token_bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    @abstractmethod
    def _choice(self, choice: Choice) -> Json:
        """The choice object of a complete response."""

    @abstractmethod
    def _opening(self, choice: Choice, first: OutputDelta) -> list[Json]:
        """Choice objects that precede the first generated text."""

    @abstractmethod
    def _piece(self, choice: Choice, text: str, logprobs: Json | None) -> Json:
        """A choice object with new text."""

    @abstractmethod
    def _ending(self, choice: Choice) -> Json:
        """The choice object that ends a stream, with the finish reason."""

    @abstractmethod
    def _logprobs(self, choice: Choice, entries: Sequence[TokenLogprob]) -> Json:
        """Log-probabilities of new tokens, in the format of the route. Must be called once per token, in order."""


class CompletionAnswer(Answer):
    """The response of `/v1/completions`.

    `echo[i]` is the prompt text to put before choice i; `only_echo` omits the generated tokens.
    """

    whole_object = chunk_object = "text_completion"

    def __init__(self, *head: Any, echo: Sequence[str] | None = None, only_echo: bool = False, **keywords: Any) -> None:
        super().__init__(*head, **keywords)
        self._echo = echo
        self._only_echo = only_echo

    def gather(self, index: int, delta: OutputDelta) -> None:
        choice = self.choices[index]
        if not choice.opened:
            choice.opened = True
            for piece in self._opening(choice, delta):
                choice.text.append(piece["text"])
                if piece["logprobs"]:
                    choice.logprobs.append(piece["logprobs"])
        super().gather(index, self._visible(delta))

    def chunks(self, index: int, delta: OutputDelta) -> list[Json]:
        return super().chunks(index, self._visible(delta))

    def _visible(self, delta: OutputDelta) -> OutputDelta:
        if not self._only_echo:
            return delta
        end = delta.finish_reason and "length"
        return OutputDelta(
            delta.request_id, "", (), prompt_logprobs=delta.prompt_logprobs, finish_reason=end, metrics=delta.metrics
        )

    def _choice(self, choice: Choice) -> Json:
        joined = {key: [v for part in choice.logprobs for v in part[key]] for key in _LOGPROB_KEYS}
        piece = self._piece(choice, "".join(choice.text), joined if choice.logprobs else None)
        end = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return piece | end | self._of_output(choice) | self._of_prompt(choice)

    def _opening(self, choice: Choice, first: OutputDelta) -> list[Json]:
        if self._echo is None:
            return []
        text, logprobs = self._echo[choice.index], None
        if first.prompt_logprobs is not None:
            logprobs = self._scored(choice, list(zip(choice.prompt, first.prompt_logprobs, strict=True)))
        choice.offset = len(text)
        return [self._piece(choice, text, logprobs)]

    def _piece(self, choice: Choice, text: str, logprobs: Json | None) -> Json:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _ending(self, choice: Choice) -> Json:
        end = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return self._piece(choice, "", None) | end

    def _logprobs(self, choice: Choice, entries: Sequence[TokenLogprob]) -> Json:
        return self._scored(choice, [(e.token_id, e) for e in entries])

    def _scored(self, choice: Choice, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> Json:
        """OpenAI's four lists, with one entry per token. The first token of a prompt has no log-probability."""
        out: Json = {key: [] for key in _LOGPROB_KEYS}
        for id, entry in tokens:
            text = self._token(id)
            out["tokens"].append(text)
            out["token_logprobs"].append(None if entry is None else max(entry.logprob, MIN_LOGPROB))
            out["top_logprobs"].append(None if entry is None else self._top(entry))
            out["text_offset"].append(choice.offset)
            choice.offset += len(self._tokenizer.token_text(id))
        return out

    def _top(self, entry: TokenLogprob) -> Json:
        """Log-probability by token text of the most likely tokens and the sampled one.

        If two tokens have the same text, the more likely one is kept.
        """
        top: Json = {}
        for id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._token(id), max(logprob, MIN_LOGPROB))
        return top


_LOGPROB_KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
