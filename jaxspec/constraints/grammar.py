"""Grammars of structured outputs, by llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.constraints import json_schema
from jaxspec.constraints.limits import limits
from jaxspec.constraints.structural_tag import structural_tag_grammar
from jaxspec.constraints.trial import Trial
from jaxspec.step.masks import mask_of_ids
from jaxspec.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from jaxspec.models.load.tokenizer import Tokenizer

#: CPU time of an output's grammar, in seconds: for the whole, and more for each token.
SECONDS, TOKEN_SECONDS = 2.0, 0.02
#: Compiled grammars that are kept.
_KEPT = 128


class GrammarMatcher:
    """A `constraint.Matcher` of llguidance.

    It may take `SECONDS` of CPU time, and `TOKEN_SECONDS` more for each token of the output. Usual grammars take less
    than a millisecond for one, but an ambiguous one may take a second for each, in the engine's thread.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary):
        self._matcher, self._vocabulary = matcher, vocabulary
        self._spent, self._tokens = 0.0, 0

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary)

    def consume(self, token: int) -> bool:
        with self._working():
            taken = self._matcher.try_consume_tokens([token]) == 1
        self._tokens += taken
        return taken

    def rollback(self, tokens: int) -> None:
        with _no_panic():
            self._matcher.rollback(tokens)
        self._tokens -= tokens

    def fill(self, mask: np.ndarray) -> None:
        if self.finished:
            mask[:] = self._vocabulary.end_mask
            return
        with self._working():
            _filler()(self._matcher, mask.view(np.int32)[None], 0)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Raise `RuntimeError` if the grammar has run into one of the limits, or out of time."""
        began = thread_time()
        with _no_panic():
            yield
        self._spent += thread_time() - began
        if self._matcher.is_error():
            raise RuntimeError(f"the structured output cannot go on: {_plain(self._matcher.get_error())}")
        if self._spent > SECONDS + self._tokens * TOKEN_SECONDS:
            raise RuntimeError("the structured output cannot go on: it takes too much time")

    def forced(self) -> list[int]:
        """llguidance leaves out a last token that might be another one with more text after it: most often the quote
        after a JSON key, where whitespace may come before the colon. It hardly ever does."""
        with self._working():
            tokens, text = self._matcher.compute_ff_tokens(), self._matcher.compute_ff_bytes()
        rest = text[sum(len(self._vocabulary.tokens[token]) for token in tokens) :]
        return [*tokens, *self._vocabulary.key_end] if rest == b'"' else tokens

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()


@cache
def _filler() -> Callable[[LLMatcher, np.ndarray, int], None]:
    """llguidance's function for masks, imported with the first grammar."""
    from llguidance.numpy import fill_next_token_bitmask

    return fill_next_token_bitmask


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe; the first use takes about a second."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        """`vocab`: tokens of the model, which may be more than the tokenizer's."""
        self._tokenizer, self._vocab = tokenizer, vocab
        self._lock, self._trial = threading.Lock(), Trial()
        self._last: tuple[StructuredOutputs, str] | None = None
        self._compiled: OrderedDict[str, GrammarMatcher] = OrderedDict()

    def matcher(self, outputs: StructuredOutputs) -> GrammarMatcher:
        """A matcher at the start of the output. Raises `InvalidRequest` with llguidance's message if the grammar is not
        valid, uses what llguidance does not support, or is too large."""
        from llguidance import LLMatcher

        if not self._tokenizer.eos_token_ids:
            raise outputs.invalid("needs a model with an end token")
        last = self._last  # several outputs of a request have the same one
        grammar = last[1] if last and last[0] is outputs else _grammar_of(outputs, self._tokenizer)
        self._last = (outputs, grammar)
        if grammar not in self._compiled and (error := self._trial.error(_without_ids(grammar))):
            raise outputs.invalid(f"is not possible: {_plain(error)}")
        with self._lock:
            if (found := self._compiled.get(grammar)) is None:
                try:
                    with _no_panic():
                        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0, limits=limits())
                except RuntimeError as panic:
                    raise outputs.invalid(f"is not possible: {panic}") from None
                found = GrammarMatcher(matcher, self._of_model)
                if matcher.is_error():
                    raise outputs.invalid(f"is not possible: {_plain(matcher.get_error())}")
                self._compiled[grammar] = found
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return found.copy()

    def close(self) -> None:
        """End the process that tries grammars."""
        self._trial.close()

    @cached_property
    def _of_model(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, self._vocab)

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self._of_model), eos_token=list(self._tokenizer.eos_token_ids))


class Vocabulary:
    """The exact bytes of each token and what else llguidance's `TokenizerWrapper` reads.

    end_mask: allows the end tokens, for a grammar that has ended. key_end: the token of the end of a JSON key and the
    colon; empty if there is none.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self._encode = tokenizer.encode
        self.end_mask = mask_of_ids(tokenizer.eos_token_ids, vocab)
        special = tokenizer.special_ids
        self.tokens = [tokenizer.token_bytes(id) or b"\xff<unused>" for id in range(vocab)]
        self.special_token_ids = sorted(special)
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.key_end = [id for id in self._encode('":', False) if self.tokens[id] == b'":']

    def __call__(self, text: Any) -> Sequence[int]:
        return self._encode(text.decode() if isinstance(text, bytes) else text, False)


def _without_ids(grammar: str) -> str:
    """The grammar with a special token that the trial's tokenizer has, instead of the model's."""
    return re.sub(r"<\[[0-9,^*-]+\]>", "<[256]>", grammar)


def _grammar_of(outputs: StructuredOutputs, tokenizer: Tokenizer) -> str:
    """llguidance's form of the grammar. Raises `InvalidRequest` if it cannot be converted."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if outputs.regex is not None:
        return LLMatcher.grammar_from_regex(outputs.regex)
    if outputs.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, outputs.choice)))
    if outputs.grammar is not None:
        declared = outputs.grammar.lstrip().startswith("%llguidance")
        try:
            return LLMatcher.grammar_from_lark(outputs.grammar if declared else any_to_lark(outputs.grammar))
        except Exception as error:
            raise outputs.invalid(f"is not possible: {error}") from None
    if outputs.structural_tag is not None:
        try:
            return LLMatcher.grammar_from_lark(structural_tag_grammar(outputs.structural_tag, tokenizer))
        except (ValueError, RecursionError) as error:
            raise outputs.invalid(str(error)) from None
    return json_schema.grammar_of(outputs)


@contextmanager
def _no_panic() -> Iterator[None]:
    """Raise a `RuntimeError` instead of the panic of Rust code, which is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError("it is too complex") from None


def _plain(error: str) -> str:
    """llguidance's message in one line."""
    if "NoExtensionBias" in error:
        return "no text matches it"
    told = re.split(r"\n\s*\d+ \| |\s*<(?:non-verbose/|state)>", error)[0]  # without the text of the grammar
    return " ".join(re.sub(r"^at \d+\(\d+\): ", "", told).split())[:500]
