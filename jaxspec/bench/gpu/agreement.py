"""Whether all ways of computing the same greedy decode choose the same tokens.

Every way goes along the tokens that the float32 path chose, whatever it would choose itself. So each choice is made
after the same tokens as the others', and the first difference is where free decodes would part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec.bench.gpu import forests
from jaxspec.bench.gpu.card import Card
from jaxspec.bench.gpu.plan import BATCH, DRAFTS, REFERENCE
from jaxspec.step.packing import SamplingInputs, Tree
from jaxspec.step.runner import ModelRunner

#: Right drafts of a tree, one after the other; each node before them has a wrong draft too.
_RIGHT = 3
_PARENTS = [-1, 0, 1, 2, 2, 1, 0]
#: Sizes of the compiled steps: a token or tree alone, and all requests or a part of a prompt.
_BUCKETS = 8, 16

#: The choices of each request.
Choices = list[list[int]]


@dataclass
class _Walk:
    """One request on its way along `tokens`, of which the first `prompt` are given."""

    tokens: list[int]
    prompt: int
    pages: np.ndarray
    committed: int = 0
    chosen: list[int] = field(default_factory=list)

    def tree(self, drafts: bool, vocab: int) -> Tree:
        """The next known token, with drafts if as many tokens are known ahead."""
        ahead = self.tokens[self.committed : self.committed + 1 + _RIGHT]
        if not drafts or len(ahead) <= _RIGHT:
            return Tree.chain(ahead[:1], self.committed, self.pages, SamplingInputs())
        wrong = [(token + 1) % vocab for token in ahead]
        tokens = [*ahead, wrong[3], wrong[2], wrong[1]]
        return forests.tree(_PARENTS, tokens, self.committed, self.pages, range(len(tokens)))

    def take(self, sampled: np.ndarray, accepted: np.ndarray) -> None:
        """Note the choices at the root and the right drafts that were accepted."""
        right = 1
        while right <= min(_RIGHT, len(accepted) - 1) and accepted[right]:
            right += 1
        self.chosen += sampled[:right].tolist()
        self.committed += right


def compare(card: Card) -> dict[str, Any]:
    """The share of equal choices and the first different one, for each way and against the reference, and for each
    pair of ways that the kernel computes in one dtype. With the sizes of SmolLM2-135M, whatever the card's model is."""
    sizes, rng = card.sizes, np.random.default_rng(card.seed)
    model = "tiny" if card.model == "tiny" else "smollm2-135m"
    paths = {
        REFERENCE: ("float32", False), "kernel, float32": ("float32", True), "XLA, bfloat16": ("bfloat16", False),
        "kernel, bfloat16": ("bfloat16", True),
    }  # fmt: skip
    found: dict[str, Choices] = {}
    texts: list[list[int]] = []
    for name, (dtype, kernel) in paths.items():
        context = max(sizes.prompts) + sizes.answer + _RIGHT + 1
        runner = card.runner(model, _BUCKETS, len(sizes.prompts), context, dtype, kernel)
        vocab = runner.penalties.table.generated.shape[1]
        if not texts:
            texts = [rng.integers(vocab, size=length).tolist() for length in sizes.prompts]
            found[name] = _alone(runner, texts, sizes.prompts, sizes.answer, vocab)
            texts = [text + chosen for text, chosen in zip(texts, found[name], strict=True)]
            continue
        found[name] = _alone(runner, texts, sizes.prompts, sizes.answer, vocab)
        if kernel:
            found[f"{name}, {DRAFTS}"] = _alone(runner, texts, sizes.prompts, sizes.answer, vocab, drafts=True)
            found[f"{name}, {BATCH}"] = _together(runner, texts, sizes.prompts, sizes.answer, vocab)
        del runner
        card.release()
    pairs = [(name, REFERENCE) for name in found if name != REFERENCE]
    for name in ("kernel, float32", "kernel, bfloat16"):
        pairs += [(f"{name}, {how}", name) for how in (DRAFTS, BATCH)]
    different = len({token for chosen in found[REFERENCE] for token in chosen})
    return {
        "model": model, "requests": len(texts), "tokens": sizes.answer, "different_tokens": different,
        "pairs": [{"path": a, "against": b, **equal(found[a], found[b])} for a, b in pairs],
    }  # fmt: skip


def equal(some: Choices, others: Choices) -> dict[str, Any]:
    """The share of equal choices, the requests without a difference, and the earliest different choice (from 0)."""
    firsts, same = [], []
    for a, b in zip(some, others, strict=True):
        same += [x == y for x, y in zip(a, b, strict=True)]
        firsts.append(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None))
    parted = [first for first in firsts if first is not None]
    return {
        "equal": float(np.mean(same)), "whole": len(firsts) - len(parted), "first": min(parted, default=None)
    }  # fmt: skip


def _alone(
    runner: ModelRunner, texts: list[list[int]], prompts: tuple[int, ...], answer: int, vocab: int, drafts: bool = False
) -> Choices:
    """The choices of each request when it runs alone. Texts that end with their prompts go on with the choices."""
    out = []
    for text, prompt, pages in zip(texts, prompts, _pages(runner, len(texts)), strict=True):
        walk = _Walk(list(text), prompt, pages)
        _prefill(runner, walk)
        while len(walk.chosen) < answer:
            _advance(runner, [walk], drafts, vocab)
            if walk.committed == len(walk.tokens):
                walk.tokens.append(walk.chosen[-1])
        out.append(walk.chosen[:answer])
    return out


def _together(
    runner: ModelRunner, texts: list[list[int]], prompts: tuple[int, ...], answer: int, vocab: int
) -> Choices:
    """The choices of all requests in the same steps."""
    pages = _pages(runner, len(texts))
    walks = [_Walk(list(text), prompt, own) for text, prompt, own in zip(texts, prompts, pages, strict=True)]
    for walk in walks:
        _prefill(runner, walk)
    for _ in range(answer):
        _advance(runner, walks, False, vocab)
    return [walk.chosen for walk in walks]


def _pages(runner: ModelRunner, requests: int) -> np.ndarray:
    count = runner.kv_cache.keys.shape[1]
    return (
        np.random.default_rng(1)
        .permutation(count)
        .astype(np.int32)[: count // requests * requests]
        .reshape(requests, -1)
    )


def _prefill(runner: ModelRunner, walk: _Walk) -> None:
    """Compute the prompt but for its last token, in parts."""
    largest = runner.shapes[-1].tokens
    while walk.committed < walk.prompt - 1:
        part = walk.tokens[walk.committed : min(walk.committed + largest, walk.prompt - 1)]
        runner.execute(runner.pack([Tree.chain(part, walk.committed, walk.pages, SamplingInputs())])).wait()
        walk.committed += len(part)


def _advance(runner: ModelRunner, walks: list[_Walk], drafts: bool, vocab: int) -> None:
    trees = [walk.tree(drafts, vocab) for walk in walks]
    packed = runner.pack(trees)
    decision = runner.execute(packed).wait()
    sampled, accepted = decision[: packed.shape.rows], decision[packed.shape.rows :]
    for walk, tree, node, row in zip(walks, trees, packed.nodes, packed.rows, strict=True):
        walk.take(sampled[row : row + len(tree.rows)], accepted[node : node + len(tree.token)])
