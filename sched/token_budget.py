"""The token budget of one step."""

from __future__ import annotations

from dataclasses import replace

from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.manager import KVCacheManager
from jaxspec.sched.plan import Lookahead, ScheduledRequest
from jaxspec.sched.request import Request


class TokenBudget:
    """Tokens and logit rows of one step that are not used yet."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.tokens = config.max_num_batched_tokens
        #: Logit rows.
        self.logit_rows = config.max_logit_rows
        #: Prompt tokens (recomputed ones included) among them; None: no limit.
        self.prompt_tokens: int | None = None

    def __bool__(self) -> bool:
        """Whether a prompt could take tokens."""
        return self.tokens > 0 and self.logit_rows > 0 and self.prompt_tokens != 0

    def take(self, request: Request) -> ScheduledRequest | None:
        """Schedule as many of the request's uncomputed tokens as fit; None if none do."""
        known = len(request.tokens) - request.computed
        count = min(known, self.tokens)
        if not request.decoding and self.prompt_tokens is not None:
            count = min(count, self.prompt_tokens)
        if request.prompt_logprobs:
            count = min(count, self.logit_rows)
        elif count == known and not self.logit_rows:
            count -= 1  # leave out the token whose logits are read
        if count < 1:
            return None
        scheduled = ScheduledRequest(request, request.computed, count)
        self.tokens -= count
        self.logit_rows -= scheduled.logit_rows
        if not request.decoding and self.prompt_tokens is not None:
            self.prompt_tokens -= count
        return scheduled

    def allow_drafts(self, scheduled: list[ScheduledRequest], lookahead: Lookahead, kv: KVCacheManager) -> int:
        """Let the decoding requests draft with what is left, with pages for what they may accept.

        Returns the most draft nodes of all together. Each may use all of them if `lookahead.pooled`, or else an even
        share.
        """
        decoding = [i for i, s in enumerate(scheduled) if s.decodes]
        left = nodes = min(self.tokens, self.logit_rows)
        for rank, i in enumerate(decoding):
            request = scheduled[i].request
            drafts = min(lookahead.drafts, left if lookahead.pooled else left // (len(decoding) - rank))
            levels = min(lookahead.levels, drafts, request.max_tokens - request.most_output - 1)
            if levels > 0 and not kv.grow(request, levels):
                levels = kv.spare_tokens(request)
            if levels > 0:
                scheduled[i] = replace(scheduled[i], drafts=drafts, levels=levels)
                left -= 0 if lookahead.pooled else drafts
        return nodes
