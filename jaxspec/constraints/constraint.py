"""The constraint of one request: which tokens may follow each node of its token tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Protocol

import numpy as np

from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.step.masks import mask_of, mask_of_ids

#: What probably follows a draft of these tokens, and its chance; None: unknown.
Guess = Callable[[Sequence[int]], tuple[int, float] | None]
#: The chance stated for what followed in the same place before, and how many different followers are kept.
_AS_BEFORE, _FOLLOWERS = 0.85, 4
#: Marks in `Layout` that something else than layout followed.
_OTHER = -1


class Matcher(Protocol):
    """The state of a grammar after some tokens."""

    def consume(self, token: int) -> bool:
        """Advance by a token. False, and no change, if it is not allowed. Raises `RuntimeError` if that takes too much
        work: then it cannot go on at all."""
        ...

    def rollback(self, tokens: int) -> None:
        """Go back by this many consumed tokens."""
        ...

    def fill(self, mask: np.ndarray) -> None:
        """Write the mask `[words]` uint32 of the tokens that may follow, see `step.masks`."""
        ...

    def forced(self) -> list[int]:
        """Tokens of the only text that may follow, up to where there is a choice, and perhaps a likely one after them;
        empty if there is a choice at once. Other tokens may write the same text."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the constrained output is complete: no further token is allowed."""
        ...


class Layout:
    """How an output is laid out: which tokens of whitespace and punctuation follow which, by depth of brackets.

    Most grammars, such as those of JSON schemas, leave a choice of whitespace, but an output hardly ever varies it.
    `text_of`: the text of a token that has neither letters nor digits; empty for others.
    """

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self._text_of, self._last, self._depth = text_of, "", 0
        self._followers: dict[tuple[str, int], list[int]] = {}

    def append(self, token: int) -> None:
        """A token was decided."""
        text = self._text_of(token)
        follower = token if text else _OTHER
        if self._last and _end(text) != self._last:  # what followed itself would be guessed without end
            followers = self._followers.setdefault((self._last, self._depth), [])
            if follower in followers:
                followers.remove(follower)
            followers.insert(0, follower)
            del followers[_FOLLOWERS:]
        self._last, self._depth = _end(text), self._depth + _opened(text)

    def after(self, path: Sequence[int]) -> list[int]:
        """Layout tokens that have followed the last one of the output and `path`, and later than anything else has. The
        latest come first, but whitespace alone comes last: where a quote or bracket may follow, one usually does."""
        texts = [self._text_of(token) for token in path]
        at = _end(texts[-1]) if texts else self._last, self._depth + sum(map(_opened, texts))
        followers = self._followers.get(at, [])
        known = followers[: followers.index(_OTHER)] if _OTHER in followers else followers
        return sorted(known, key=lambda token: self._text_of(token).isspace())


def _end(text: str) -> str:
    """What the layout after a text depends on: whatever a comma, a colon or an opening bracket comes after."""
    return text[-1] if text[-1:] in {",", ":", "{", "["} else text


def _opened(text: str) -> int:
    """Brackets that a text opens, less those that it closes."""
    return sum((c in "{[") - (c in "}]") for c in text)


class Constraint:
    """All constraints of one request, and its output so far.

    matcher: the grammar of the output; None: any. allowed: mask `[words]` uint32 of the tokens that may be sampled;
    None: all. bad_words: token sequences that do not occur in the output. min_tokens: output tokens before one of
    `stop_ids` may be sampled. If together they leave no token, the grammar alone counts, and after it `allowed`.
    layout_of: see `Layout`.

    Drafts do not change what is decided: a draft token is masked like any other, and `prune` only saves the
    verification of those that the masks would forbid.
    """

    def __init__(
        self,
        vocab: int,
        matcher: Matcher | None = None,
        allowed: np.ndarray | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        min_tokens: int = 0,
        stop_ids: Collection[int] = (),
        layout_of: Callable[[int], str] = lambda token: "",
    ) -> None:
        self._matcher, self._min_tokens, self._layout = matcher, min_tokens, Layout(layout_of)
        self._bad_words = [tuple(word) for word in bad_words]
        self._stop_ids = frozenset(stop_ids)
        self._any = any_ = mask_of(np.ones(vocab, bool)) if allowed is None else allowed
        # Most nodes ban nothing, or the same tokens as the node before.
        self._without = lru_cache(64)(lambda banned: any_ & ~mask_of_ids(banned, vocab) if banned else any_)
        self._output: list[int] = []
        #: Why the grammar cannot go on, for example because it takes too much work; None: it can.
        self.failure: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the grammar has ended, so that the answer has."""
        return self._matcher is not None and self._matcher.finished

    def append(self, token: int) -> None:
        """A token was decided."""
        self._output.append(token)
        if self._matcher is None or self._matcher.finished or self.failure is not None:
            return
        self._layout.append(token)
        try:
            if not self._matcher.consume(token):
                self.failure = f"the grammar does not allow the token {token}"
        except RuntimeError as error:
            self.failure = str(error)

    def forced(self, most: int, guess: Guess = lambda path: None) -> list[tuple[int, float]]:
        """A draft of at most `most` tokens that the grammar allows, each with the chance stated for it: 1 for those
        that the grammar leaves no choice about. Where it does, `guess` says how the draft goes on, or else the layout
        of the output so far."""
        matcher, path, chances = self._matcher, list[int](), list[float]()
        if matcher is None or self.failure is not None:
            return []

        def takes(token: int, chance: float) -> bool:
            if len(path) == most or matcher.finished or not self._consumes(token):
                return False
            path.append(token)
            chances.append(chance)
            return True

        going = True
        try:
            while going and len(path) < most and not matcher.finished:
                if certain := matcher.forced():
                    going = all(takes(token, 1.0) for token in certain)
                else:
                    going = any(takes(token, chance) for token, chance in self._probable(path, guess))
        except RuntimeError as error:  # a limit of the grammar, which is no failure of a drafter
            self.failure = str(error)
        finally:  # whatever fails, the grammar's state must be that of the output
            matcher.rollback(len(path))
        return list(zip(path, chances, strict=True))

    def _probable(self, path: Sequence[int], guess: Guess) -> list[tuple[int, float]]:
        """What may follow a draft where there is a choice, and the chances, likeliest first."""
        usual = dict.fromkeys(self._layout.after(path), _AS_BEFORE)
        if (guessed := guess(path)) is None:
            return [*usual.items()]
        token, chance = guessed
        return [*{token: max(chance, usual.get(token, 0.0)), **usual}.items()]

    def masks(self, token: Sequence[int] = (0,), depth: Sequence[int] = (0,)) -> np.ndarray:
        """Masks `[nodes, words]` uint32 of what may follow each node of a tree in preorder.

        Node 0 is the last known token. A node that must not follow its parent is never accepted, whatever its mask.
        """
        out = np.tile(self._any, (len(token), 1))
        with closing(self._walk(token, depth)) as nodes:
            for i, path in nodes:
                if path is not None:
                    self._fill(out[i], path)
        return out

    def prune(self, candidates: Candidates) -> Candidates:
        """The candidates without those that must not follow their parents: their places are empty."""
        children: dict[int, list[int]] = {}
        for i, parent in enumerate(candidates.parent.tolist()):
            children.setdefault(parent, []).append(i)
        order, depths, stack = [], [0], [(i, 1) for i in reversed(children.get(-1, ()))]
        while stack:
            node, depth = stack.pop()
            order.append(node)
            depths.append(depth)
            stack += [(child, depth + 1) for child in reversed(children.get(node, ()))]
        tokens = [0, *candidates.token[order].tolist()]
        with closing(self._walk(tokens, depths)) as nodes:
            gone = [order[i - 1] for i, path in nodes if path is None or not self._allows(path)]
        if not gone:
            return candidates
        logprob = candidates.logprob.copy()
        logprob[gone] = -np.inf
        return Candidates(candidates.token, candidates.parent, logprob, candidates.drawn)

    def _walk(self, token: Sequence[int], depth: Sequence[int]) -> Generator[tuple[int, list[int] | None]]:
        """(node, tokens on the path to it without node 0) in preorder, with the grammar in that state; None instead of
        the path below a token that the grammar does not allow."""
        path: list[int] = []
        blocked: int | None = None  # depth of the token that is not allowed
        try:
            for i, here in enumerate(depth):
                if blocked is not None and here > blocked:
                    yield i, None
                    continue
                blocked = None
                above = max(0, here - 1)
                if self._matcher is not None and len(path) > above:
                    self._matcher.rollback(len(path) - above)
                del path[above:]
                if here:
                    if self._matcher is not None and (self._matcher.finished or not self._consumes(token[i])):
                        blocked = here
                        yield i, None
                        continue
                    path.append(token[i])
                yield i, path
        finally:  # also where what reads it fails
            if self._matcher is not None and path:
                self._matcher.rollback(len(path))

    def _consumes(self, token: int) -> bool:
        """Whether the grammar has advanced by a draft token."""
        assert self._matcher is not None
        try:
            return self._matcher.consume(token)
        except RuntimeError as error:
            self.failure = str(error)
            return False

    def _allows(self, path: Sequence[int]) -> bool:
        """Whether the last token of the path may follow the others, apart from the grammar."""
        if not path:
            return True
        *before, token = path
        return bool(self._any[token // 32] >> (token % 32) & 1) and token not in self._banned(before)

    def _banned(self, path: Sequence[int]) -> set[int]:
        """Tokens that must not follow the path."""
        banned: set[int] = set()
        if len(self._output) + len(path) < self._min_tokens:
            banned |= self._stop_ids
        if self._bad_words:
            longest = max(map(len, self._bad_words))
            recent = tuple([*self._output[-longest:], *path])
            for *before, last in self._bad_words:
                if not before or recent[-len(before) :] == tuple(before):
                    banned.add(last)
        return banned

    def _fill(self, mask: np.ndarray, path: Sequence[int]) -> None:
        rest = self._without(frozenset(self._banned(path)))
        if self._matcher is None:
            mask[:] = rest if rest.any() else self._any
            return
        try:
            self._matcher.fill(mask)
        except RuntimeError as error:
            self.failure = str(error)
        if (rest & mask).any():
            mask &= rest
