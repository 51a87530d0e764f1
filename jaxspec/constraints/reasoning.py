"""Reasoning before a constrained answer: free, up to a budget of tokens."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from jaxspec.step.masks import mask_of, mask_of_ids

if TYPE_CHECKING:
    from jaxspec.chat.reasoning import Reasoning
    from jaxspec.constraints.constraint import Matcher
    from jaxspec.models.load.tokenizer import Tokenizer


class ReasoningTokens:
    """The tags of a model's reasoning as tokens, and the masks that they need. Thread-safe."""

    def __init__(self, begin: str, end: str, tokenizer: Tokenizer, vocab: int):
        """`vocab`: tokens of the model."""
        self.begin, self.begin_text = tokenizer.encode(begin, add_special_tokens=False), begin.encode()
        self.end, self.end_text = tokenizer.encode(end, add_special_tokens=False), end.encode()
        self.bytes_of = tokenizer.token_bytes
        self.stops = frozenset(tokenizer.eos_token_ids)
        self.any = mask_of(np.ones(vocab, bool))
        self.no_stop = self.any & ~mask_of_ids(self.stops, vocab)
        self._vocab = vocab
        ends = ((id, self.bytes_of(id)) for id in range(vocab))
        last = self.end_text[-1:]
        self._completing = [(id, text) for id, text in ends if last in text and len(text) > 1]
        #: By how much of the end tag the text has: the mask without tokens that complete the tag and go on.
        self.beyond = cache(self._beyond)

    def only(self, token: int) -> np.ndarray:
        """The mask that allows one token."""
        return mask_of_ids([token], self._vocab)

    def _beyond(self, known: int) -> np.ndarray:
        rest = self.end_text[known:]
        ids = [id for id, text in self._completing if text.startswith(rest) and text[len(rest) :].strip()]
        return ~mask_of_ids(ids, self._vocab)


class _State(NamedTuple):
    """tail: the last bytes of the reasoning. tokens: of the reasoning. begun: tokens of the begin tag so far. closing:
    tokens of the end tag since the budget was used up. consumed: tokens that the grammar took with the last one."""

    phase: Literal["maybe", "reasoning", "content"]
    tail: bytes = b""
    tokens: int = 0
    begun: int = 0
    closing: int = 0
    consumed: int = 0


class ReasoningMatcher:
    """A `constraint.Matcher`: any reasoning, then what `inner` allows; None: anything.

    budget: tokens of the reasoning after which its end tag must follow; None: any number.
    """

    def __init__(self, form: Reasoning, tokens: ReasoningTokens, inner: Matcher | None, budget: int | None):
        self._tokens, self._inner, self._budget = tokens, inner, budget
        self._states = [_State("reasoning" if form.opened else "maybe")]

    def consume(self, token: int) -> bool:
        state = self._states[-1]._replace(consumed=0)
        match state.phase:
            case "content":
                after = self._into_grammar(state, [token])
            case "maybe" if self._inner is None:
                after = self._maybe_of_text(state, token)
            case "maybe" if token == self._tokens.begin[state.begun]:
                complete = state.begun + 1 == len(self._tokens.begin)
                after = state._replace(phase="reasoning" if complete else "maybe", begun=state.begun + 1)
            case "maybe":
                after = self._into_grammar(state, [*self._tokens.begin[: state.begun], token])
            case "reasoning":
                after = self._in_reasoning(state, token)
        if after is None:
            return False
        self._states.append(after)
        return True

    def rollback(self, tokens: int) -> None:
        for _ in range(tokens):
            if (consumed := self._states.pop().consumed) and self._inner is not None:
                self._inner.rollback(consumed)

    def fill(self, mask: np.ndarray) -> None:
        state = self._states[-1]
        match state.phase:
            case "content":
                self._fill_content(mask, [])
            case "maybe" if self._inner is None:
                mask[:] = self._tokens.any
            case "maybe":
                self._fill_content(mask, self._tokens.begin[: state.begun])
                mask |= self._tokens.only(self._tokens.begin[state.begun])
            case "reasoning" if self._budget is not None and state.tokens >= self._budget:
                mask[:] = self._tokens.only(self._tokens.end[state.closing])
            case "reasoning":
                mask[:] = self._tokens.any if self._inner is None else self._tokens.no_stop
                if self._inner is not None:
                    for known in self._known(state.tail):
                        mask &= self._tokens.beyond(known)

    def forced(self) -> list[int]:
        state = self._states[-1]
        if state.phase == "reasoning" and self._budget is not None and state.tokens >= self._budget:
            return self._tokens.end[state.closing :]
        return self._inner.forced() if state.phase == "content" and self._inner is not None else []

    @property
    def finished(self) -> bool:
        return self._states[-1].phase == "content" and self._inner is not None and self._inner.finished

    def _maybe_of_text(self, state: _State, token: int) -> _State:
        """Without a grammar the answer may have whitespace before the begin tag, and tokens that go on after it."""
        text, tag = (state.tail + self._tokens.bytes_of(token)).lstrip(), self._tokens.begin_text
        if text.startswith(tag):
            return state._replace(phase="reasoning", tail=text.removeprefix(tag))
        return state._replace(phase="maybe" if tag.startswith(text) else "content", tail=text)

    def _into_grammar(self, state: _State, tokens: list[int]) -> _State | None:
        if self._inner is None:
            return state._replace(phase="content")
        for i, token in enumerate(tokens):
            if self._inner.finished or not self._inner.consume(token):
                self._inner.rollback(i)
                return None
        return state._replace(phase="content", consumed=len(tokens))

    def _in_reasoning(self, state: _State, token: int) -> _State | None:
        if token in self._tokens.stops and self._inner is not None:
            return None
        spent = self._budget is not None and state.tokens >= self._budget
        text = state.tail + self._tokens.bytes_of(token)
        _, ended, beyond = text.partition(self._tokens.end_text)
        return state._replace(
            phase="content" if ended and (self._inner is None or not beyond.strip()) else "reasoning",
            tail=text[-len(self._tokens.end_text) :], tokens=state.tokens + 1,
            closing=min(state.closing + 1, len(self._tokens.end) - 1) if spent else 0,
        )  # fmt: skip

    def _fill_content(self, mask: np.ndarray, first: list[int]) -> None:
        """The mask of what may follow `first` without reasoning."""
        if self._inner is None:
            mask[:] = self._tokens.any
        elif self._into_grammar(self._states[-1], first) is None:
            mask[:] = 0
        else:
            self._inner.fill(mask)
            self._inner.rollback(len(first))

    def _known(self, tail: bytes) -> list[int]:
        """How many bytes of the end tag the text may have so far."""
        end = self._tokens.end_text
        return [n for n in range(len(end)) if tail.endswith(end[:n])]
