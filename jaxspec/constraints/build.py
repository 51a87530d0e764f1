"""Builds the constraints of requests from their sampling parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from jaxspec.constraints.constraint import Constraint, Matcher
from jaxspec.constraints.grammar import Grammars
from jaxspec.constraints.reasoning import ReasoningMatcher, ReasoningTokens
from jaxspec.errors import InvalidRequest
from jaxspec.sampling_params import SamplingParams
from jaxspec.step.masks import mask_of_ids

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer


class Constraints:
    """Builds constraints for one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        """`vocab`: tokens of the model."""
        self._tokenizer, self._vocab, self._grammars = tokenizer, vocab, Grammars(tokenizer, vocab)
        self._threads, self._closed = ThreadPoolExecutor(2, "jaxspec-grammars"), False
        self._words = lru_cache(16)(self._tokens_of)  # the outputs of a request have the same ones
        self._layout_of = cache(self._layout_text)  # asked for each token of a draft, again and again
        self._reasoning_tokens = cache(lambda begin, end: ReasoningTokens(begin, end, tokenizer, vocab))

    def of(self, params: SamplingParams, stop_ids: Collection[int]) -> Constraint | None:
        """The constraint at the start of an output; None if all tokens may be sampled.

        `stop_ids`: tokens that end it. Compiling a new grammar takes milliseconds, the first one a second. Raises
        `InvalidRequest`.
        """
        if not params.constrained:
            return None
        matcher = self._matcher_of(params)
        allowed = None
        if params.allowed_token_ids is not None:
            allowed = mask_of_ids(params.allowed_token_ids, self._vocab)
        return Constraint(
            self._vocab, matcher, allowed, self._words(tuple(params.bad_words)), params.min_tokens, stop_ids,
            self._layout_of,
        )  # fmt: skip

    def _matcher_of(self, params: SamplingParams) -> Matcher | None:
        grammar = self._grammars.matcher(params.structured_outputs) if params.structured_outputs else None
        form, budget = params.reasoning, params.thinking_token_budget
        if form is None or (grammar is None and budget is None):
            return grammar
        return ReasoningMatcher(form, self._reasoning_tokens(form.begin, form.end), grammar, budget)

    def compile(self, params: SamplingParams) -> None:
        """Compile what the parameters need and keep it, for `of`. Raises `InvalidRequest`."""
        self._matcher_of(params)

    async def compile_aside(self, params: SamplingParams) -> None:
        """`compile` in threads that compile grammars only: a hostile one takes seconds, and others wait for it. Does
        nothing once this is closed."""
        if not params.constrained or self._closed:
            return
        try:
            compiling = self._threads.submit(lambda: None if self._closed else self.compile(params))
        except RuntimeError:  # closed meanwhile
            return
        await asyncio.wrap_future(compiling)

    def close(self) -> None:
        """End the process that tries grammars."""
        self._closed = True
        self._threads.shutdown(wait=False)
        self._grammars.close()

    def _layout_text(self, token: int) -> str:
        """The token's text if it is ASCII whitespace and punctuation, else empty."""
        text = self._tokenizer.token_text(token)
        return text if text.isascii() and not any(map(str.isalnum, text)) else ""

    def _tokens_of(self, words: tuple[str, ...]) -> list[list[int]]:
        """Each bad word at the start of a text and after a space."""
        found: list[list[int]] = []
        for word in words:
            for text in (word.lstrip(), f" {word.lstrip()}"):
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if not ids:
                    raise InvalidRequest("bad_words", f"bad_words: {word!r} has no tokens")
                if ids not in found:
                    found.append(ids)
        return found
