"""Engine-side state of one request: builds its step inputs and turns sampled tokens into output deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from jaxspec.constraints.constraint import Constraint
from jaxspec.engine.detokenizer import Detokenizer
from jaxspec.errors import InvalidRequest
from jaxspec.models.load.tokenizer import Tokenizer
from jaxspec.outputs import OutputDelta, RequestMetrics, TokenLogprob
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.plan import RequestResult, ScheduledRequest
from jaxspec.sched.request import UNKNOWN, Request
from jaxspec.sched.spec.trees.candidates import Draft
from jaxspec.step.packing import SamplingInputs, Tree
from jaxspec.step.sampler import Logprobs


class RequestState:
    """One request, from submission to its last output. The thread that submits it makes it; from then on only the
    engine's thread uses it.

    `seed` is the 64-bit key of the request's random numbers; `stop_ids` are tokens that end it, as does the output
    length `end_at`. `predict`: see `Engine.submit`. `constraint`: which tokens may be sampled; None: all.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        seed: int,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        on_output: Callable[[OutputDelta], None],
        end_at: int | None = None,
        predict: bool = False,
        constraint: Constraint | None = None,
    ):
        self.request, self.params, self.on_output = request, params, on_output
        self.metrics = RequestMetrics(
            request.arrival, prompt_tokens=request.prompt_len, max_tokens=request.max_tokens, slo=request.slo
        )
        self._stop_ids, self._end_at, self.constraint = stop_ids, end_at, constraint
        self._detokenizer = Detokenizer(
            tokenizer, params.stop, params.include_stop_str_in_output, params.skip_special_tokens, params.min_tokens
        )
        self.predict = predict
        #: Its sampling parameters for the device.
        self.sampling = SamplingInputs(
            params.temperature, params.top_p, params.min_p, max(0, params.top_k),
            (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF), params.presence_penalty, params.frequency_penalty,
            params.repetition_penalty, params.logprobs is not None,
        )  # fmt: skip
        #: Whether it needs a row of the penalty table while it runs.
        self.penalised = params.penalised
        #: When the step of its latest tokens ended.
        self.last_token: float | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        #: What `submit` would have raised, had it known the error.
        self.refused: InvalidRequest | None = None
        #: Whether the scheduler has been given it.
        self.scheduled = False
        #: Steps in a row that failed with it, since its last token.
        self.failures = 0
        #: All its output tokens, also those that it was resumed with.
        self.output: list[int] = []
        self._stop_reason: str | int | None = None
        self._closed = False
        self._tokens: list[int] = []
        self._texts: list[str] = []  # of the first tokens of _tokens; the others are not decoded yet
        self._drafted: list[bool] = []  # whether each token of _tokens is an accepted draft
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob | None] = [None]

    def resume(self, tokens: Sequence[int]) -> None:
        """Take over output tokens that the request has from elsewhere; no delta has them.

        Raises `InvalidRequest` if they end the request, or if its grammar does not allow them.
        """
        self._take(tokens, 0)
        if self.finish_reason is not None:
            raise InvalidRequest("resumed", self.error or "resumed: with these output tokens the request has ended")
        self._decode(self._tokens[len(self._texts) :])
        self._texts, self._tokens = [], []
        self.metrics.output_tokens = self.metrics.resumed_tokens = len(tokens)

    # -- before a step ---------------------------------------------------------------------------------------------

    def tree(self, scheduled: ScheduledRequest, penalty_row: int | None, after: int) -> Tree:
        """The request's known tokens of this step, as a chain: a prefill chunk, or one token.

        `after`: its tree in the step under way, which samples its last token; -1: that token is known.
        """
        r, end = self.request, scheduled.end
        following = None
        if scheduled.reads_all:  # prompt log-probabilities need the logits of every prompt position
            following = np.asarray([*r.tokens[scheduled.start + 1 : end + 1], 0][: scheduled.count], np.int32)
        pages = np.asarray(r.pages, np.int32)
        rows = scheduled.count if scheduled.reads_all else 1
        tokens = r.tokens[scheduled.start : end]
        assert (tokens[-1] == UNKNOWN) == (after >= 0) and (after < 0 or scheduled.count == 1)
        masks = self.constraint.masks() if self.constraint and scheduled.samples else None
        return Tree.chain(
            tokens, scheduled.start, pages, self.sampling, rows, following, penalty_row, masks, after=after
        )  # fmt: skip

    def draft_tree(self, scheduled: ScheduledRequest, draft: Draft, penalty_row: int | None, after: int) -> Tree:
        """The last token as the root of a draft tree. Logits are read at every node. `after`: see `tree`."""
        r, nodes = self.request, len(draft) + 1
        index = np.arange(nodes, dtype=np.int32)
        fields = np.zeros((5, nodes), np.int32)
        fields[:, 0] = r.tokens[-1], 0, nodes, -1, 1
        fields[:4, 1:] = draft.token, draft.depth, draft.subtree, draft.parent + 1
        token, depth, subtree, parent, known = fields
        masks = self.constraint.masks(token.tolist(), depth.tolist()) if self.constraint else None
        drawn = None if draft.drawn is None else np.append(np.int32(-1), draft.drawn)
        return Tree(
            token, depth, subtree, known, scheduled.start, np.asarray(r.pages, np.int32), index, self.sampling,
            penalty_row=penalty_row, parent=parent, drawn=drawn, masks=masks, after=after,
        )  # fmt: skip

    # -- after a step ----------------------------------------------------------------------------------------------

    def append(
        self,
        scheduled: ScheduledRequest,
        tokens: list[int],
        logprobs: Logprobs | None,
        first_row: int,
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
        new = self._take(tokens, len(self.output))
        accepted = len(path) - 1 if path else 0  # the token after them is the target's own
        self._drafted += [i < accepted for i in range(len(new))]
        if logprobs is not None and self.params.logprobs is not None:
            for row, token in zip(path or [scheduled.last_row], new, strict=False):
                self._logprobs.append(_logprob(logprobs, first_row + row, token, self.params.logprobs))
        return RequestResult(tuple(new), self.finish_reason)

    def _take(self, tokens: Sequence[int], before: int) -> list[int]:
        """Append output tokens, after `before` earlier ones. -> the tokens up to the one that ends the request."""
        new: list[int] = []
        end_at = inf if self._end_at is None else self._end_at
        for token in tokens:
            new.append(token)
            if self.constraint is not None:
                self.constraint.append(token)
            if self.constraint is not None and self.constraint.failure is not None:
                self.finish_reason, self.error = "error", self.constraint.failure
                if (outputs := self.params.structured_outputs) is not None:
                    self.refused = InvalidRequest(outputs.given_as, f"{outputs.given_as}: {self.error}")
            elif token in self._stop_ids:
                self.finish_reason, self._stop_reason = "stop", token
            elif self.constraint is not None and self.constraint.finished:
                self.finish_reason = "stop"
            elif before + len(new) >= self.request.max_tokens:
                self.finish_reason = "length"
            elif before + len(new) >= end_at:
                self.finish_reason = "stop"
            if self.finish_reason:
                break
        if self.params.stop:
            new = self._decode_until_stop(new)
        self._tokens += new
        self.output += new
        return new

    def natural_finish_reason(self, eos: frozenset[int]) -> str:
        """ "stop" or "length" if the model ended the answer itself: at a token of `eos`, or cut at max_tokens.

        "abort" otherwise: at a stop string or stop token of the request, with `ignore_eos`, or when cancelled.
        """
        stopped = self.finish_reason == "stop" and self._stop_reason in eos
        cut = self.finish_reason == "length" and not self.params.ignore_eos
        return self.finish_reason if self.finish_reason and (stopped or cut) else "abort"

    def _decode_until_stop(self, tokens: list[int]) -> list[int]:
        """Decode now, because a stop string may end the request. -> the tokens up to it."""
        before = len(self._texts)
        if (stop := self._decode(tokens)) is not None:
            self.finish_reason, self._stop_reason = "stop", stop
        return tokens[: len(self._texts) - before]

    def _decode(self, tokens: list[int]) -> str | None:
        """Add the text of each token, up to the one that completes a stop string. -> that string."""
        # The text of a stop token is left out unless requested, but a stop string may precede it.
        visible = self._visible(tokens)
        for token in visible:
            text, stop, _ = self._detokenizer.push((token,))
            self._texts.append(text)
            if stop is not None:
                return stop
        self._texts += [""] * (len(tokens) - len(visible))
        return None

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

    def update_metrics(self) -> None:
        """Take over what the scheduler has recorded of the request."""
        m, r = self.metrics, self.request
        m.first_scheduled, m.first_token = r.first_scheduled, r.first_token
        m.cached_tokens, m.preemptions, m.predicted_quantiles = r.cached_tokens, r.preemptions, r.predicted_quantiles
        m.predicted_tokens = None if r.first_prediction is None else min(r.first_prediction, r.max_tokens)

    def delta(self) -> OutputDelta | None:
        """Output since the last delta; None if there is none. The delta with the finish reason is the last one."""
        if self._closed or not (self._tokens or self.finish_reason):
            return None
        self._closed = self.finish_reason is not None
        self._decode(self._tokens[len(self._texts) :])
        held = self._detokenizer.finish() if self.finish_reason and not isinstance(self._stop_reason, str) else ""
        if held and self._texts:
            self._texts[-1] += held
            held = ""
        self.metrics.output_tokens += len(self._tokens)
        self.update_metrics()
        prompt = None
        if self.request.prompt_logprobs and self._tokens and self.metrics.output_tokens == len(self._tokens):
            prompt = tuple(self._prompt_logprobs)  # with the first tokens: the whole prompt has been computed
        out = OutputDelta(
            self.request.id, "".join(self._texts) + held, tuple(self._tokens), tuple(self._logprobs), prompt,
            self.finish_reason, self._stop_reason, self.metrics, self.error, tuple(self._texts), tuple(self._drafted),
            self.refused,
        )  # fmt: skip
        self._texts, self._tokens, self._drafted, self._logprobs = [], [], [], []
        return out

    def broken(self, error: str) -> OutputDelta:
        """The last delta of a request whose `delta` failed: an error without text."""
        self._closed, self.finish_reason, self.error = True, "error", error
        return OutputDelta(self.request.id, "", (), (), None, "error", None, self.metrics, error)


def _top(logprobs: Logprobs, row: int, k: int) -> tuple[tuple[int, float], ...]:
    return tuple((int(t), float(p)) for t, p in zip(logprobs.top_ids[row, :k], logprobs.top[row, :k], strict=True))


def _logprob(logprobs: Logprobs, row: int, token: int, k: int) -> TokenLogprob:
    return TokenLogprob(token, float(logprobs.chosen[row]), _top(logprobs, row, k))
