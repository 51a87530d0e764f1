"""Fakes that need no device: a byte tokenizer, and an engine that repeats a fixed text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from jaxspec.constraints.build import Constraints
from jaxspec.engine.detokenizer import Detokenizer
from jaxspec.engine.live_snapshot import LiveSnapshot
from jaxspec.engine.metrics import EngineStats
from jaxspec.errors import EngineDead, EngineDraining, InvalidRequest
from jaxspec.outputs import OutputDelta, RequestMetrics, SpeculationCounts, TokenLogprob
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.admission import SloRefused
from jaxspec.sched.config import SloSettings
from jaxspec.sched.scheduler import QueueFull
from jaxspec.sched.slo import Slo

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer

RECITED = "Die Eule sagt: fünf Bücher, 漢字 und 🦉 — "


def recited(tokens: int, start: int = 0) -> str:
    """The text of `tokens` output tokens of `FakeEngine`, from byte `start` of the repeated text."""
    text = RECITED.encode() * (start + tokens)
    return text[start : start + tokens].decode("utf-8", "replace")


class ByteTokenizer:
    """Ids 0 … 255 are bytes, the next ones the tokens of `more`; the last id is a special end token."""

    def __init__(self, more: Sequence[bytes] = (), leading_space_drops: bool = False, end: str = "<|end|>") -> None:
        self._bytes = [bytes([b]) for b in range(256)] + list(more) + [end.encode()]
        self._leading_space_drops = leading_space_drops
        self.end_id = len(self._bytes) - 1
        self.eos_token_ids = (self.end_id,)
        self.bos_token_id = None
        self.vocab_size = len(self._bytes)
        self.special_ids = frozenset({self.end_id})
        self.longest_token = max(map(len, self._bytes))
        self.has_chat_template, self.chat_template, self.tool_template = True, "a template", None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def special_id(self, text: str) -> int | None:
        return next((id for id in self.special_ids if self._bytes[id] == text.encode()), None)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raw = b"".join(self._bytes[i] for i in ids if not (skip_special_tokens and i in self.special_ids))
        return raw.decode("utf-8", "replace").removeprefix(" " if self._leading_space_drops else "")

    def token_bytes(self, id: int) -> bytes:
        return self._bytes[id] if 0 <= id < self.vocab_size else b""

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True,
        continue_final_message: bool = False, **kw: Any,
    ) -> str:  # fmt: skip
        if messages[0]["role"] == "assistant":
            raise ValueError("a conversation starts with the user")
        shown = "".join(f"({name}={value})" for name, value in kw.items())
        text = shown + "".join(f"[{m['role']}]{m['content']}\n" for m in messages)
        return text.removesuffix("\n") if continue_final_message else text + "[assistant]" * add_generation_prompt


def as_tokenizer(fake: ByteTokenizer) -> Tokenizer:
    """`fake` under the type that the engine names: it has the methods of a `Tokenizer`, but not its class."""
    return cast("Tokenizer", fake)


@dataclass
class _Recital:
    id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    on_output: Callable[[OutputDelta], None]
    stream: Detokenizer
    metrics: RequestMetrics
    position: int = field(default=0)
    last: float | None = None


class FakeEngine:
    """Has the engine's interface. Each request gets the bytes of `RECITED`, repeated, starting at byte `seed`.

    `step` is the time between tokens in seconds. At most `max_num_seqs` requests run and `max_queued_requests` wait.
    With `draft` it reports one verification of three draft tokens for every token but the first, of which 1, 2, 0, 1,
    2, 0, … are accepted, and says of every second token that it was an accepted draft.
    """

    def __init__(
        self,
        step: float = 0.0005,
        max_num_seqs: int = 64,
        max_queued_requests: int = 128,
        max_model_len: int = 512,
        draft: Sequence[str] = (),
        predicted: float | None = None,
        kv_quantized: bool = False,
        slo: SloSettings | None = None,
        text: str | None = None,
    ) -> None:
        self.tokenizer = ByteTokenizer()
        self.model_name, self.model_names = "fake", ["fake", "alias"]
        self.constraints = Constraints(as_tokenizer(self.tokenizer), self.tokenizer.vocab_size)
        self.model_config = SimpleNamespace(vocab_size=self.tokenizer.vocab_size)
        self.config = SimpleNamespace(
            model="fake",
            dtype="float32",
            max_queued_requests=max_queued_requests,
            max_num_seqs=max_num_seqs,
            draft=list(draft),
            tool_call_parser="auto",
            reasoning_parser="auto",
            slo=slo or SloSettings(),
            page_size=32,
            kv_cache_dtype="auto",
            enable_prefix_caching=True,
            gpu_memory_utilization=0.9,
        )
        self.max_model_len = max_model_len
        #: Sampling parameters of requests that do not set them.
        self.default_sampling: dict[str, Any] = {}
        self.step = step
        #: Predicted output tokens of every request.
        self.predicted = predicted
        #: `kv_quantized` in the metrics of every request.
        self.kv_quantized = kv_quantized
        #: Why requests with an SLO are refused; None admits them.
        self.refusal: str | None = None
        self.failure: str | None = None
        self.observers: list[Callable[[RequestMetrics, str], None]] = []
        self.token_observers: list[Callable[[float, int], None]] = []
        self.first_token_observers: list[Callable[[RequestMetrics], None]] = []
        self.step_observers: list[Callable[[int], None]] = []
        #: Of `watch`; tests call them.
        self.watchers: list[Callable[[LiveSnapshot], None]] = []
        #: Parameters, SLOs and tenants of all submitted requests, and the ids of those cancelled while they ran.
        self.submitted: list[SamplingParams] = []
        self.slos: list[Slo] = []
        self.tenants: list[str] = []
        self.cancelled: list[str] = []
        #: What answers say, from byte `seed` on. A text of the test's is not repeated: it ends with "stop".
        self.text = (text or RECITED).encode()
        self._repeats = text is None
        self._state = "ok"
        self._stop_at: float | None = None
        self._fail = False
        self._lock = threading.Condition()
        self._requests: dict[str, _Recital] = {}
        self._generated = 0
        self._speculation = SpeculationCounts()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def health(self) -> str:
        return self._state

    def start(self) -> None:
        self._thread.start()

    def shutdown(self, drain: bool = False, timeout: float = 30.0) -> None:
        with self._lock:
            if self._state == "ok":
                self._state = "draining"
            self._stop_at = time.monotonic() + (timeout if drain else 0)
            self._lock.notify()
        self._thread.join()
        self.constraints.close()

    def fail(self) -> None:
        """Make the engine's loop fail."""
        with self._lock:
            self._fail = True
            self._lock.notify()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_output: Callable[[OutputDelta], None],
        *,
        request_id: str | None = None,
        priority: int = 0,
        slo: Slo | None = None,
        predict: bool = False,
        tenant: str = "",
    ) -> str:
        if not all(0 <= t < self.tokenizer.vocab_size for t in prompt_ids):
            raise InvalidRequest("prompt", "prompt token ids are outside the vocabulary")
        if any(t >= self.tokenizer.vocab_size for t in params.logit_bias):
            raise InvalidRequest("logit_bias", "logit_bias holds token ids outside the vocabulary")
        stream = Detokenizer(
            as_tokenizer(self.tokenizer), params.stop, params.include_stop_str_in_output, params.skip_special_tokens
        )
        with self._lock:
            if self._state == "dead":
                raise EngineDead(self.failure or "")
            if self._state == "draining":
                raise EngineDraining
            if len(self._requests) >= self.config.max_num_seqs + self.config.max_queued_requests:
                raise QueueFull("too many requests are waiting")
            wanted: Slo = self.config.slo.slo if slo is None else slo
            if wanted and self.refusal:
                raise SloRefused(self.refusal)
            id = request_id or str(len(self.submitted))
            metrics = RequestMetrics(
                time.monotonic(), prompt_tokens=len(prompt_ids), predicted_tokens=self.predicted,
                predicted_quantiles=None if self.predicted is None else (self.predicted - 1, 2 * self.predicted),
            )  # fmt: skip
            metrics.kv_quantized, metrics.slo = self.kv_quantized, wanted
            metrics.max_tokens = params.max_tokens or 16
            self.submitted.append(params)
            self.tenants.append(tenant)
            self.slos.append(wanted)
            recital = _Recital(
                id, list(prompt_ids), params, metrics.max_tokens, on_output, stream, metrics, params.seed or 0
            )
            self._requests[id] = recital
            self._lock.notify()
        return id

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._requests:
                self.cancelled.append(request_id)
                self._end(self._requests[request_id], "abort")

    def summary(self, preset: str | None = None) -> list[tuple[str, str]]:
        return [("model", "fake"), ("preset", str(preset))]

    def watch(self, on_snapshot: Callable[[LiveSnapshot], None]) -> Callable[[], None]:
        self.watchers.append(on_snapshot)
        return lambda: self.watchers.remove(on_snapshot)

    def stats(self) -> EngineStats:
        running = min(len(self._requests), self.config.max_num_seqs)
        return EngineStats(
            running=running,
            waiting=len(self._requests) - running,
            kv_pages=1000,
            kv_usage=running / self.config.max_num_seqs,
            generation_tokens=self._generated,
            host_seconds=1.0,
            step_seconds=4.0,
            draft_tokens=self._speculation.proposed,
            accepted_tokens=self._speculation.accepted,
            verifications=self._speculation.verifications,
            accepted_by_level=tuple(self._speculation.by_level),
        )

    def _run(self) -> None:
        next_step = time.monotonic()
        while True:
            with self._lock:
                while not self._requests and self._stop_at is None and not self._fail:
                    self._lock.wait()
                    next_step = time.monotonic()
                if self._fail:
                    self._state, self.failure = "dead", "the device is on fire"
                    return self._end_all("error", self.failure)
                if self._stop_at is not None and (not self._requests or time.monotonic() >= self._stop_at):
                    self._state, self.failure = "dead", "the engine has been shut down"
                    return self._end_all("abort", None)
                running = list(self._requests.values())[: self.config.max_num_seqs]
                for recital in running:
                    self._advance(recital)
                for observe in self.step_observers:
                    observe(len(running))
            next_step += self.step
            time.sleep(max(0.0, next_step - time.monotonic()))

    def _end_all(self, reason: str, error: str | None) -> None:
        for recital in list(self._requests.values()):
            self._end(recital, reason, error=error)

    def _advance(self, r: _Recital) -> None:
        now = time.monotonic()
        prompt_logprobs = None
        if r.last is None:
            r.metrics.first_scheduled = r.metrics.first_token = now
            if r.params.prompt_logprobs is not None:
                scored = (self._logprob(id, r.params.prompt_logprobs) for id in r.prompt[1:])
                prompt_logprobs = (None, *scored)
            for observe_first in self.first_token_observers:
                observe_first(r.metrics)
        else:
            for observe in self.token_observers:
                observe(now - r.last, 1)
            if self.config.draft:
                for counts in (self._speculation, r.metrics.speculation):
                    counts.add(3, r.metrics.output_tokens % 3)
        r.last = now
        token = self.text[r.position % len(self.text)]
        r.position += 1
        self._generated += 1
        r.metrics.output_tokens += 1
        text, stop, _ = r.stream.push([token])
        logprobs = () if r.params.logprobs is None else (self._logprob(token, r.params.logprobs),)
        ended = stop or (r.position >= len(self.text) and not self._repeats)
        reason = "stop" if ended else "length" if r.metrics.output_tokens == r.max_tokens else None
        drafted = (bool(self.config.draft) and r.metrics.output_tokens % 2 == 0,)
        extra = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "drafted": drafted}
        if reason:
            self._end(r, reason, text + r.stream.finish(), (token,), stop_reason=stop, **extra)
        else:
            r.on_output(OutputDelta(r.id, text, (token,), texts=(text,), **extra))

    def _end(self, r: _Recital, reason: str, text: str = "", tokens: tuple[int, ...] = (), **extra: Any) -> None:
        del self._requests[r.id]
        r.metrics.finished = time.monotonic()
        for observe in self.observers:
            observe(r.metrics, reason)
        texts = (text,) if tokens else ()
        r.on_output(OutputDelta(r.id, text, tokens, finish_reason=reason, metrics=r.metrics, texts=texts, **extra))

    def _logprob(self, id: int, top: int) -> TokenLogprob:
        likeliest = [(id, -0.5), (ord("x"), -1.5), (ord("y"), float("-inf"))]
        return TokenLogprob(id, -0.5, tuple(likeliest[:top]))
