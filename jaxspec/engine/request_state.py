"""One request inside the engine: what it has to be asked of each step, and what becomes of the tokens it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.engine.detokenizer import Detokenizer
from jaxspec.models.load.tokenizer import Tokenizer
from jaxspec.outputs import OutputDelta, RequestMetrics, TokenLogprob
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.plan import RequestResult, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.trees.candidates import Draft
from jaxspec.step.packing import SamplingInputs, Tree
from jaxspec.step.runner import ModelRunner
from jaxspec.step.sampler import Logprobs


class RequestState:
    """Belongs to the engine's thread. `seed` is the request's key, 64 bits."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        seed: int,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        on_output: Callable[[OutputDelta], None],
    ):
        self.request, self.params, self.on_output = request, params, on_output
        self.metrics = RequestMetrics(request.arrival, prompt_tokens=request.prompt_len, slo=request.slo)
        self._seed = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
        self._stop_ids = stop_ids
        self._stream = Detokenizer(
            tokenizer, params.stop, params.include_stop_str_in_output, params.skip_special_tokens
        )
        self.penalty_row: int | None = None
        self._last_sampling: tuple[tuple[int | None, bool], SamplingInputs] | None = None
        self._penalty_known = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._stop_reason: str | int | None = None
        self._closed = False
        self._text = ""
        self._tokens: list[int] = []
        self._unread = 0  # tokens of _tokens whose text is not in _text yet
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob | None] = [None]

    # -- before a step ---------------------------------------------------------------------------------------------

    def tree(self, scheduled: ScheduledRequest, model_runner: ModelRunner) -> Tree:
        """The request's nodes in this step."""
        r = self.request
        if self.penalty_row is not None:
            self._sync_penalties(model_runner)
        end = scheduled.start + scheduled.count
        # Prompt log-probabilities need the logits of every prompt position; others only those of the last token.
        following = (
            np.asarray([*r.tokens[scheduled.start + 1 : end + 1], 0][: scheduled.count], np.int32)
            if scheduled.reads_all
            else None
        )
        pages = np.asarray(r.pages, np.int32)
        rows = scheduled.count if scheduled.reads_all else 1
        sampling = self.sampling(scheduled.reads_all)
        return Tree.chain(r.tokens[scheduled.start : end], scheduled.start, pages, sampling, rows, following)

    def draft_tree(self, scheduled: ScheduledRequest, draft: Draft, model_runner: ModelRunner) -> Tree:
        """The last known token with a draft below it; every node chooses."""
        if self.penalty_row is not None:
            self._sync_penalties(model_runner)
        r, n = self.request, len(draft) + 1
        ahead = np.arange(n, dtype=np.int32)
        known = (ahead == 0).astype(np.int32)
        join = lambda first, rest: np.concatenate([np.asarray([first], np.int32), rest])  # noqa: E731
        return Tree(
            join(r.tokens[-1], draft.token), join(0, draft.depth), join(n, draft.subtree), known, scheduled.start,
            np.asarray(r.pages, np.int32), ahead, self.sampling(), parent=join(-1, draft.parent + 1),
            drawn=None if draft.drawn is None else join(-1, draft.drawn),
        )  # fmt: skip

    def sampling(self, reads_all: bool = False) -> SamplingInputs:
        """How its tokens are chosen; with `reads_all`, their log-probabilities are wanted in any case."""
        p, key = self.params, (self.penalty_row, reads_all)
        if self._last_sampling is None or self._last_sampling[0] != key:
            sampling = SamplingInputs(
                p.temperature, p.top_p, p.min_p, max(0, p.top_k), self._seed, p.presence_penalty, p.frequency_penalty,
                p.repetition_penalty, self.penalty_row, p.logprobs is not None or reads_all,
            )  # fmt: skip
            self._last_sampling = (key, sampling)
        return self._last_sampling[1]

    def _sync_penalties(self, model_runner: ModelRunner) -> None:
        assert self.penalty_row is not None
        r, row = self.request, self.penalty_row
        if self._penalty_known == 0:
            model_runner.clear_penalties(row)
            model_runner.add_penalties(row, r.tokens[: r.prompt_len], prompt=True)
            if self.params.logit_bias:
                tokens = list(self.params.logit_bias)
                model_runner.add_penalties(row, tokens, bias=[self.params.logit_bias[t] for t in tokens])
            self._penalty_known = r.prompt_len
        model_runner.add_penalties(row, r.tokens[self._penalty_known :], count=1)
        self._penalty_known = len(r.tokens)

    def drop_penalty_row(self) -> int | None:
        """Give the row back, at a preemption or the end; it is written anew if the request runs again."""
        row, self.penalty_row, self._penalty_known = self.penalty_row, None, 0
        return row

    # -- after a step ----------------------------------------------------------------------------------------------

    def absorb(
        self, scheduled: ScheduledRequest, tokens: list[int], logprobs: Logprobs | None, first_row: int, now: float,
        path: Sequence[int] | None = None,
    ) -> RequestResult:  # fmt: skip
        """Take a step's new tokens, up to the one that ends the request.

        `first_row` is where the request's choices begin in `logprobs`; `path` is which of them gave each token, by
        default the last one.
        """
        if logprobs is not None and scheduled.reads_all:
            self._take_prompt_logprobs(scheduled, logprobs, first_row)
        if not tokens:
            return RequestResult()
        if self.metrics.first_token is None:
            self.metrics.first_token = now
        taken: list[int] = []
        produced = self.request.output_len
        for token in tokens:
            taken.append(token)
            if token in self._stop_ids:
                self.finish_reason, self._stop_reason = "stop", token
            elif produced + len(taken) >= self.request.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        if self.params.stop:
            taken = self._read(taken)
        else:
            self._unread += len(taken)
        self._tokens += taken
        if logprobs is not None and self.params.logprobs is not None:
            for place, token in zip(path or [scheduled.last_row], taken, strict=False):
                self._logprobs.append(_logprob(logprobs, first_row + place, token, self.params.logprobs))
        return RequestResult(tuple(taken), self.finish_reason)

    def own_end(self, eos: frozenset[int]) -> str:
        """The finish reason where the answer's length is the model's own doing, as far as it goes: "stop" at an end
        token of `eos`, "length"; "abort" where the request put an end to it, or forbade one."""
        stopped = self.finish_reason == "stop" and self._stop_reason in eos
        cut = self.finish_reason == "length" and not self.params.ignore_eos
        return self.finish_reason if self.finish_reason and (stopped or cut) else "abort"

    def _read(self, tokens: list[int]) -> list[int]:
        """Turn tokens to text now, because a stop string may end the request; -> the tokens up to it."""
        # A stop token is no text unless it is asked for, but everything before it may hold a stop string.
        text, stop, consumed = self._stream.push(self._visible(tokens))
        self._text += text
        if stop is None:
            return tokens
        self.finish_reason, self._stop_reason = "stop", stop
        return tokens[:consumed]

    def _visible(self, tokens: list[int]) -> list[int]:
        ended = bool(tokens) and self._stop_reason == tokens[-1] and not isinstance(self._stop_reason, str)
        return tokens[:-1] if ended and not self.params.include_stop_str_in_output else tokens

    def _take_prompt_logprobs(self, scheduled: ScheduledRequest, logprobs: Logprobs, first_row: int) -> None:
        r = self.request
        for i in range(scheduled.count):
            position = scheduled.start + i + 1
            # After a preemption positions come again; those already taken are skipped.
            if position < r.prompt_len and position == len(self._prompt_logprobs):
                entry = TokenLogprob(
                    r.tokens[position], float(logprobs.following[first_row + i]),
                    _top(logprobs, first_row + i, self.params.prompt_logprobs or 0),
                )  # fmt: skip
                self._prompt_logprobs.append(entry)

    def delta(self) -> OutputDelta | None:
        """What has come since the last delta, None if nothing; after the one with the finish reason there is none."""
        if self._closed or not (self._tokens or self.finish_reason):
            return None
        self._closed = self.finish_reason is not None
        if self._unread:
            unread = self._tokens[-self._unread :]
            self._text += self._stream.push(self._visible(unread))[0]
            self._unread = 0
        if self.finish_reason and not isinstance(self._stop_reason, str):
            self._text += self._stream.finish()
        self.metrics.output_tokens += len(self._tokens)
        self.metrics.cached_tokens, self.metrics.preemptions = self.request.cached_tokens, self.request.preemptions
        self.metrics.predicted_tokens = self.request.first_prediction
        prompt = None
        if self.request.prompt_logprobs and self._tokens and self.metrics.output_tokens == len(self._tokens):
            prompt = tuple(self._prompt_logprobs)  # with the first tokens: the whole prompt has been computed
        out = OutputDelta(
            self.request.id, self._text, tuple(self._tokens), tuple(self._logprobs), prompt, self.finish_reason,
            self._stop_reason, self.metrics, self.error,
        )  # fmt: skip
        self._text, self._tokens, self._logprobs = "", [], []
        return out


def _top(logprobs: Logprobs, i: int, k: int) -> tuple[tuple[int, float], ...]:
    return tuple((int(t), float(p)) for t, p in zip(logprobs.top_ids[i, :k], logprobs.top[i, :k], strict=True))


def _logprob(logprobs: Logprobs, i: int, token: int, k: int) -> TokenLogprob:
    return TokenLogprob(token, float(logprobs.chosen[i]), _top(logprobs, i, k))
