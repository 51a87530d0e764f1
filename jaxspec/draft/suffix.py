"""Suffix drafting: what followed the request's last tokens in its own text, and in earlier answers, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import log

import numpy as np

from jaxspec.draft.suffix_index import MAX_MATCH, SuffixIndex
from jaxspec.draft.suffix_memory import SuffixMemory
from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.drafter import Proposal, SamplingOf, SharedDevice
from jaxspec.sched.spec.trees.candidates import Candidates

#: Occurrences that a tree is made of. Each is followed for at most this many times the length of its match: what comes
#: after that is hardly ever verified.
_MATCHES, _DEPTH = 8, 3
#: A token that continues a match of n tokens is stated to be right with probability n / (n + this): in the request's
#: own text, and in earlier answers.
_DOUBT, _DOUBT_OF_OTHERS = 1.6, 3.0
#: Tokens of a request's own text that are searched, and slots of each hash table.
_OWN_TOKENS, _OWN_SLOTS = 1 << 16, 1 << 10


@dataclass(slots=True)
class _Node:
    """weight: of the occurrences through it. chance: that its children hold the next token."""

    weight: int = 0
    chance: float = 0.0
    children: dict[int, _Node] = field(default_factory=dict)


class SuffixDrafter(SharedDevice):
    """SuffixDecoding (Oliaro et al., arXiv 2411.04975): trees of the continuations of earlier occurrences.

    Frequencies are probabilities, and a longer match makes them surer. Searches the request's own text, and the answers
    of `memory` to the same tenant. Without one, only its own text: that is prompt lookup decoding (Saxena 2023).
    """

    free = True

    def __init__(self, name: str, memory: SuffixMemory | None = None) -> None:
        self.name, self.widths, self.memory = name, (1, 2) if memory else (1,), memory
        self._own = PerRequest(lambda request: SuffixIndex(_OWN_TOKENS, _OWN_SLOTS))

    def uncached_tokens(self, request: Request) -> int:
        return 0

    def propose(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int, least: float = 0.0
    ) -> Proposal:
        candidates = [self._candidates(s.request, levels, width, least) for s in scheduled]
        return lambda: candidates

    def ended(self, request: Request) -> None:
        if self.memory is not None:
            self.memory.learn(request.tenant, request.tokens[request.prompt_len :])

    def seconds(self, requests: int, uncached: int, levels: int, width: int) -> float:
        return 5e-5 * requests

    def after(self, request: Request, path: Sequence[int], least: float) -> tuple[int, float] | None:
        """The likeliest token after the request's tokens and `path`, and its stated chance; None if nothing is known of
        at least the chance `least`."""
        root = self._tree(request, [*request.tokens[-MAX_MATCH:], *path][-MAX_MATCH:], 1, least)
        if not root.children:
            return None
        total = sum(child.weight for child in root.children.values())
        token, child = max(root.children.items(), key=lambda item: item[1].weight)
        return token, root.chance * child.weight / total

    def _candidates(self, request: Request, levels: int, width: int, least: float) -> Candidates | None:
        """With width 1 a chain, else a tree of at most `levels * width` nodes, the likeliest ones."""
        root = self._tree(request, request.tokens[-MAX_MATCH:], levels, least)
        if not root.children:
            return None
        return _chain(root) if width == 1 else _likeliest(root, levels * width)

    def _tree(self, request: Request, end: Sequence[int], levels: int, least: float) -> _Node:
        """What followed `end` in the request's text and in earlier answers."""
        own, root = self._own.of(request), _Node()
        own.extend(request.tokens[len(own) :])
        _grow(root, own, end, levels, _DOUBT, least)
        if self.memory is not None and (answers := self.memory.of(request.tenant)) is not None:
            _grow(root, answers, end, levels, _DOUBT_OF_OTHERS, least)
        return root


def _grow(root: _Node, index: SuffixIndex, end: Sequence[int], levels: int, doubt: float, least: float) -> None:
    """Add to the tree what followed the matches of `end` that are long enough. A match counts as much as it is long."""
    shortest = least * doubt / (1 - least)
    for position, length in index.matches(end, _MATCHES, shortest):
        node = root
        for matched, token in enumerate(index.following(position, min(levels, _DEPTH * length)), length):
            chance = matched / (matched + doubt)
            if chance > node.chance:
                node.chance = chance
            if (child := node.children.get(token)) is None:
                child = node.children[token] = _Node()
            child.weight += length
            node = child


def _chain(root: _Node) -> Candidates:
    """The path of the likeliest children."""
    token, logprob, node, sure = list[int](), list[float](), root, 0.0
    while node.children:
        total = sum(child.weight for child in node.children.values())
        best, child = max(node.children.items(), key=lambda item: item[1].weight)
        sure += log(node.chance * child.weight / total)
        token.append(best)
        logprob.append(sure)
        node = child
    return _as_candidates(token, list(range(-1, len(token) - 1)), logprob)


def _likeliest(root: _Node, most: int) -> Candidates:
    """The nodes with the likeliest paths."""
    token, parent, logprob = list[int](), list[int](), list[float]()
    waiting: list[tuple[float, int, int, int, _Node]] = []  # -logprob, order, token, parent, node
    order = count()

    def push(node: _Node, index: int, above: float) -> None:
        total = sum(child.weight for child in node.children.values())
        for t, child in node.children.items():
            value = above + log(node.chance * child.weight / total)
            heappush(waiting, (-value, next(order), t, index, child))

    push(root, -1, 0.0)
    while waiting and len(token) < most:
        value, _, t, above, node = heappop(waiting)
        token.append(t)
        parent.append(above)
        logprob.append(-value)
        push(node, len(token) - 1, -value)
    return _as_candidates(token, parent, logprob)


def _as_candidates(token: Sequence[int], parent: Sequence[int], logprob: Sequence[float]) -> Candidates:
    return Candidates(np.asarray(token, np.int32), np.asarray(parent, np.int32), np.asarray(logprob, np.float32))
