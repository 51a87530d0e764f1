"""Engine-side state of one request: builds its step inputs and turns sampled tokens into output deltas."""

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
    """One request, from submission to its last output. Only the engine's thread uses it.

    `seed` is the 64-bit key of the request's random numbers; `stop_ids` are tokens that end it.
    """

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
        self._detokenizer = Detokenizer(
            tokenizer, params.stop, params.include_stop_str_in_output, params.skip_special_tokens
        )
        #: Its row in the device's penalty table; None: no penalties, or not running.
        self.penalty_row: int | None = None
        self._penalties_sent = 0  # tokens that the penalty table has counted
        self._last_sampling: tuple[tuple[int | None, bool], SamplingInputs] | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._stop_reason: str | int | None = None
        self._closed = False
        self._text = ""
        self._tokens: list[int] = []
        self._undecoded = 0  # the last tokens of _tokens, whose text is not in _text yet
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob | None] = [None]

    # -- before a step ---------------------------------------------------------------------------------------------

    def tree(self, scheduled: ScheduledRequest, model_runner: ModelRunner) -> Tree:
        """The request's known tokens of this step, as a chain: a prefill chunk, or one token."""
        r = self.request
        if self.penalty_row is not None:
            self._sync_penalties(model_runner)
        end = scheduled.start + scheduled.count
        following = None
        if scheduled.reads_all:  # prompt log-probabilities need the logits of every prompt position
            following = np.asarray([*r.tokens[scheduled.start + 1 : end + 1], 0][: scheduled.count], np.int32)
        pages = np.asarray(r.pages, np.int32)
        rows = scheduled.count if scheduled.reads_all else 1
        sampling = self.sampling(scheduled.reads_all)
        return Tree.chain(r.tokens[scheduled.start : end], scheduled.start, pages, sampling, rows, following)

    def draft_tree(self, scheduled: ScheduledRequest, draft: Draft, model_runner: ModelRunner) -> Tree:
        """The last known token as the root of a draft tree. Logits are read at every node."""
        if self.penalty_row is not None:
            self._sync_penalties(model_runner)
        r, nodes = self.request, len(draft) + 1
        index = np.arange(nodes, dtype=np.int32)
        known = (index == 0).astype(np.int32)
        return Tree(
            _prepend(r.tokens[-1], draft.token), _prepend(0, draft.depth), _prepend(nodes, draft.subtree), known,
            scheduled.start, np.asarray(r.pages, np.int32), index, self.sampling(),
            parent=_prepend(-1, draft.parent + 1), drawn=None if draft.drawn is None else _prepend(-1, draft.drawn),
        )  # fmt: skip

    def sampling(self, all_logprobs: bool = False) -> SamplingInputs:
        """Its sampling parameters for the device; `all_logprobs`: log-probabilities are needed in any case."""
        p, key = self.params, (self.penalty_row, all_logprobs)
        if self._last_sampling is None or self._last_sampling[0] != key:
            sampling = SamplingInputs(
                p.temperature, p.top_p, p.min_p, max(0, p.top_k), self._seed, p.presence_penalty, p.frequency_penalty,
                p.repetition_penalty, self.penalty_row, p.logprobs is not None or all_logprobs,
            )  # fmt: skip
            self._last_sampling = (key, sampling)
        return self._last_sampling[1]

    def _sync_penalties(self, model_runner: ModelRunner) -> None:
        """Bring the device's penalty row up to date with the known tokens."""
        assert self.penalty_row is not None
        r, row = self.request, self.penalty_row
        if self._penalties_sent == 0:
            model_runner.clear_penalties(row)
            model_runner.add_penalties(row, r.tokens[: r.prompt_len], prompt=True)
            if self.params.logit_bias:
                tokens = list(self.params.logit_bias)
                model_runner.add_penalties(row, tokens, bias=[self.params.logit_bias[t] for t in tokens])
            self._penalties_sent = r.prompt_len
        model_runner.add_penalties(row, r.tokens[self._penalties_sent :], count=1)
        self._penalties_sent = len(r.tokens)

    def release_penalty_row(self) -> int | None:
        """Give the row back, at a preemption or the end. If the request runs again, it gets and fills a new one."""
        row, self.penalty_row, self._penalties_sent = self.penalty_row, None, 0
        return row

    # -- after a step ----------------------------------------------------------------------------------------------

    def append(
        self,
        scheduled: ScheduledRequest,
        tokens: list[int],
        logprobs: Logprobs | None,
        first_row: int,
        now: float,
        path: Sequence[int] | None = None,
    ) -> RequestResult:
        """Append a step's new tokens, up to the one that ends the request.

        `first_row` is the request's first row in `logprobs`; `path` are the rows of the tokens relative to it, by
        default the last one.
        """
        if logprobs is not None and scheduled.reads_all:
            self._append_prompt_logprobs(scheduled, logprobs, first_row)
        if not tokens:
            return RequestResult()
        if self.metrics.first_token is None:
            self.metrics.first_token = now
        new: list[int] = []
        for token in tokens:
            new.append(token)
            if token in self._stop_ids:
                self.finish_reason, self._stop_reason = "stop", token
            elif self.request.output_len + len(new) >= self.request.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        if self.params.stop:
            new = self._decode_until_stop(new)
        else:
            self._undecoded += len(new)
        self._tokens += new
        if logprobs is not None and self.params.logprobs is not None:
            for row, token in zip(path or [scheduled.last_row], new, strict=False):
                self._logprobs.append(_logprob(logprobs, first_row + row, token, self.params.logprobs))
        return RequestResult(tuple(new), self.finish_reason)

    def natural_finish_reason(self, eos: frozenset[int]) -> str:
        """ "stop" or "length" if the model ended the answer itself: at a token of `eos`, or cut at max_tokens.

        "abort" otherwise: at a stop string or stop token of the request, with `ignore_eos`, or when cancelled.
        """
        stopped = self.finish_reason == "stop" and self._stop_reason in eos
        cut = self.finish_reason == "length" and not self.params.ignore_eos
        return self.finish_reason if self.finish_reason and (stopped or cut) else "abort"

    def _decode_until_stop(self, tokens: list[int]) -> list[int]:
        """Decode now, because a stop string may end the request. -> the tokens up to it."""
        # The text of a stop token is left out unless requested, but a stop string may precede it.
        text, stop, consumed = self._detokenizer.push(self._visible(tokens))
        self._text += text
        if stop is None:
            return tokens
        self.finish_reason, self._stop_reason = "stop", stop
        return tokens[:consumed]

    def _visible(self, tokens: list[int]) -> list[int]:
        """The tokens without a stop token at the end, unless its text is requested."""
        ended = bool(tokens) and self._stop_reason == tokens[-1] and not isinstance(self._stop_reason, str)
        return tokens[:-1] if ended and not self.params.include_stop_str_in_output else tokens

    def _append_prompt_logprobs(self, scheduled: ScheduledRequest, logprobs: Logprobs, first_row: int) -> None:
        r = self.request
        for i in range(scheduled.count):
            position = scheduled.start + i + 1
            # After a preemption positions are computed again; skip those already appended.
            if position < r.prompt_len and position == len(self._prompt_logprobs):
                entry = TokenLogprob(
                    r.tokens[position], float(logprobs.following[first_row + i]),
                    _top(logprobs, first_row + i, self.params.prompt_logprobs or 0),
                )  # fmt: skip
                self._prompt_logprobs.append(entry)

    def delta(self) -> OutputDelta | None:
        """Output since the last delta; None if there is none. The delta with the finish reason is the last one."""
        if self._closed or not (self._tokens or self.finish_reason):
            return None
        self._closed = self.finish_reason is not None
        if self._undecoded:
            undecoded = self._tokens[-self._undecoded :]
            self._text += self._detokenizer.push(self._visible(undecoded))[0]
            self._undecoded = 0
        if self.finish_reason and not isinstance(self._stop_reason, str):
            self._text += self._detokenizer.finish()
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


def _prepend(first: int, rest: np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray([first], np.int32), rest])


def _top(logprobs: Logprobs, row: int, k: int) -> tuple[tuple[int, float], ...]:
    return tuple((int(t), float(p)) for t, p in zip(logprobs.top_ids[row, :k], logprobs.top[row, :k], strict=True))


def _logprob(logprobs: Logprobs, row: int, token: int, k: int) -> TokenLogprob:
    return TokenLogprob(token, float(logprobs.chosen[row]), _top(logprobs, row, k))
