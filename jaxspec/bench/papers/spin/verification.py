"""SPIN's fast batch verification (§V-A, Fig. 12): the engine's step beside a padded one, in time, memory and padding.

A batch is what a service has running at one moment; each request verifies its last token and a chain of drafts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np

from jaxspec.bench import BenchError
from jaxspec.bench.papers.spin import requests as spin_requests
from jaxspec.bench.papers.spin.decomposition import best
from jaxspec.bench.papers.spin.options import KV_PADDED, PACKED, PADDED
from jaxspec.bench.papers.spin.padded import PaddedLayers, widened
from jaxspec.bench.papers.spin.requests import Batch, Requests
from jaxspec.bench.papers.spin.steps import Shared, Steps, Way, chain, different_pages, filled
from jaxspec.config import EngineConfig
from jaxspec.errors import ModelLoadError, explained
from jaxspec.kernels import cpu
from jaxspec.models.load import LoadedModel, load_model
from jaxspec.progress import progress
from jaxspec.sched.sim.workload import read_lengths
from jaxspec.step.buckets import BUCKETS
from jaxspec.step.kv_cache import page_bytes
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import Tree
from jaxspec.step.runner import pick_layers
from jaxspec.step.step import split
from jaxspec.step.xla import XlaLayers

#: Runs of each step before those that count.
COMPILE_ALL_FIRST = 2


def verification(args: argparse.Namespace, model: LoadedModel | None = None) -> dict[str, Any]:
    """What the options of `spin_options` ask for (`args.repeats`: batches of each size, 12), as plain data: each batch
    by kind of requests and size. Raises `BenchError`."""
    rng, config = np.random.default_rng(args.seed), EngineConfig.load()
    try:
        model = model or load_model(args.model or config.model)
        kinds = requests(args, model, rng)
    except (ModelLoadError, OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    layers = pick_layers(config, model.config)
    if not isinstance(layers, NativeLayers) or model.config.sliding_window is not None:
        raise BenchError("the padded reference needs the CPU kernels, and a model without a sliding window")
    decoder = layers.decoder(model.config, dict(model.weights), config.dtype)
    shared = Shared(model.config, split(decoder), config.page_size)
    comparison = Comparison(shared, layers, args, rng)
    count = args.repeats or 12
    points: dict[str, dict[str, list[Any]]] = {}
    with progress("batches verified", len(kinds) * len(args.batches) * count) as advance:
        for kind, found in kinds.items():
            points[kind] = {}
            for size in args.batches:
                batches = [Batch.of(found, size, args.drafts, rng) for _ in range(count)]
                points[kind][str(size)] = comparison.point(batches, advance)
    return {
        "page_size": config.page_size, "drafts": args.drafts, "rows": args.rows,
        "requests": {kind: own.means() for kind, own in kinds.items()}, "points": points,
    }  # fmt: skip


def requests(args: argparse.Namespace, model: LoadedModel, rng: np.random.Generator) -> dict[str, Requests]:
    """By the name of the kind. Raises OSError or ValueError."""
    answers = read_lengths(args.answers).output if args.answers else None
    read = lambda path: spin_requests.read(path, model.tokenizer, answers, args.context, rng)  # noqa: E731
    named = {"Alpaca": args.alpaca, "chat prompts": args.chat}
    kinds = {name: read(path) for name, path in named.items() if path}
    if args.mixed:
        kinds["mixed"] = spin_requests.mixed([*kinds.values(), *map(read, args.mixed)])
    return kinds or {"built-in": spin_requests.built_in(model.tokenizer, rng)}


class Comparison:
    """Batches verified in each way over the same KV, in turns."""

    def __init__(self, shared: Shared, layers: NativeLayers, args: argparse.Namespace, rng: np.random.Generator):
        self._shared, self._layers, self._args, self._rng = shared, layers, args, rng
        self._source = different_pages(shared.config, shared.page_size, args.seed)

    def point(self, batches: Sequence[Batch], advance: Callable[[], None]) -> list[dict[str, Any]]:
        """What became of each of these batches, all of one size."""
        size, page = len(batches[0].nodes), self._shared.page_size
        pages = [batch.pages(page) for batch in batches]
        longest, held = max(int(own.max()) for own in pages), max(int(own.sum()) for own in pages)
        tokens = {bucket(batch) for batch in batches}
        packed = Steps(self._shared, self._layers, tokens, size, longest, held)
        # Whoever verifies fewest is padded to the width of its batch, perhaps over the end of a page.
        widest = max(-(-int(b.committed.max() + b.width) // page) for b in batches)
        padded = Steps(self._shared, PaddedLayers(), tokens | {b.width * size for b in batches}, size, widest)
        found = []
        for batch in batches:
            ways = self._ways(batch, packed, padded)
            found.append({**self._sizes(batch), **self._measured(batch, ways)})
            advance()
        return found

    def _ways(self, batch: Batch, packed: Steps, padded: Steps) -> dict[str, Way]:
        size, page = len(batch.nodes), self._shared.page_size
        rows = np.arange(padded.room, dtype=np.int32).reshape(size, -1)
        live = (np.arange(rows.shape[1] * page) < batch.committed[:, None]).reshape(-1, page)
        held = [row[:n] for row, n in zip(rows, batch.pages(page), strict=True)]
        numbers = np.concatenate(held)
        places = self._rng.permutation(packed.room)[: len(numbers)].astype(np.int32)  # pages lie anywhere
        content, there = np.zeros(packed.room, np.int32), np.zeros((packed.room, page), bool)
        content[places], there[places] = numbers, live[numbers]
        tables = np.split(places, np.cumsum([len(own) for own in held])[:-1])
        drafts = [self._rng.integers(self._shared.config.vocab_size, size=n) for n in batch.nodes.tolist()]

        def trees(pages: Iterable[np.ndarray]) -> list[Tree]:
            return [chain(*own) for own in zip(drafts, batch.committed.tolist(), pages, strict=True)]

        kept, padding = filled(self._source, content, there), filled(self._source, rows.reshape(-1), live)
        return {
            PACKED: Way(packed, packed.pack(trees(tables), bucket(batch)), kept),
            KV_PADDED: Way(padded, padded.pack(trees(rows), bucket(batch)), padding),
            PADDED: Way(padded, padded.pack(widened(trees(rows), batch.width), batch.width * size), padding),
        }

    def _measured(self, batch: Batch, ways: Mapping[str, Way]) -> dict[str, Any]:
        """Milliseconds of a step launched and read (medians), bytes of its temporaries, and whether all chose alike."""
        rows = {name: way.rows(batch.nodes) for name, way in ways.items()}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(COMPILE_ALL_FIRST + self._args.runs):
            for name, way in ways.items():
                begun = perf_counter()
                np.asarray(way.steps.run(way.packed).decision)
                if i >= COMPILE_ALL_FIRST:
                    times[name].append(1e3 * (perf_counter() - begun))
        return {
            "ms": {name: float(np.median(own)) for name, own in times.items()},
            "temporaries": {name: way.steps.temporaries(way.packed) for name, way in ways.items()},
            "same_choices": {name: float((own == rows[PACKED]).mean()) for name, own in rows.items()},
        }

    def _sizes(self, batch: Batch) -> dict[str, Any]:
        """What each way reads, computes and keeps, and how SPIN's search would decompose the requests."""
        size, page = len(batch.nodes), self._shared.page_size
        tokens, position = bucket(batch), page_bytes(self._shared.config, page, "float32") // page
        begun = perf_counter()
        freely = best(batch.committed, self._args.rows * size)
        seconds = perf_counter() - begun
        by_lanes = best(batch.committed, self._args.rows * size, cpu.LANES)

        def of(packed: int, padded: int) -> dict[str, int]:
            return {PACKED: packed, KV_PADDED: padded, PADDED: padded}

        return {
            "committed": batch.committed.tolist(), "nodes": batch.nodes.tolist(),
            "needed": int(batch.committed.sum()), "real_tokens": int(batch.nodes.sum()),
            "positions": of(*(ways.positions_read(batch.committed, page) for ways in (self._layers, PaddedLayers()))),
            # The kernel scores whole vectors of keys, but takes up no more values than there are.
            "values": of(int(batch.committed.sum()), size * int(batch.committed.max())),
            "elsewhere": XlaLayers().positions_read(batch.committed, page),
            "tokens": {PACKED: tokens, KV_PADDED: tokens, PADDED: size * batch.width},
            "kv_bytes": of(position * page * int(batch.pages(page).sum()), position * size * int(batch.room.max())),
            "search": {"ms": 1e3 * seconds, "any": asdict(freely), "lanes": asdict(by_lanes)},
        }  # fmt: skip


def bucket(batch: Batch) -> int:
    """Tokens of the engine's step for the batch."""
    tokens = int(batch.nodes.sum())
    return next((b for b in BUCKETS if b >= tokens), tokens)
