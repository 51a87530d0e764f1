"""SPIN's fast batch verification (§V-A, Fig. 12): the engine's packed step against a padded one: time, memory, padding.

A batch is a snapshot of a running service; each request verifies its last token and a chain of drafts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from jaxspec.bench import BenchError
from jaxspec.bench.papers.spin import requests as spin_requests
from jaxspec.bench.papers.spin.padded import PaddedLayers, widened
from jaxspec.bench.papers.spin.requests import Batch, Requests
from jaxspec.bench.papers.spin.steps import Shared, Steps, Way, chain, different_pages, filled
from jaxspec.bench.papers.spin.verification_report import KV_PADDED, PACKED, PADDED
from jaxspec.config import EngineConfig
from jaxspec.engine.startup import for_device
from jaxspec.errors import ModelLoadError, explained
from jaxspec.kernels import cpu
from jaxspec.models.load import LoadedModel, load_model
from jaxspec.progress import progress
from jaxspec.sched.sim.workload import read_lengths
from jaxspec.step.buckets import CPU
from jaxspec.step.kv_cache import page_bytes
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import Tree
from jaxspec.step.runner import pick_layers
from jaxspec.step.step import split
from jaxspec.step.xla import XlaLayers

#: Untimed runs of each step before the timed ones.
WARM_UP = 2


def verification(args: argparse.Namespace, model: LoadedModel | None = None) -> dict[str, Any]:
    """Measurements of each batch by kind of requests and size, as plain data.

    args: the options of `experiment.add_verification`; `args.repeats`: batches of each size (default 12). Raises
    `BenchError`.
    """
    rng, config = np.random.default_rng(args.seed), for_device(EngineConfig.load())
    try:
        model = model or load_model(args.model or config.model)
        kinds = requests(args, model, rng)
    except (ModelLoadError, OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    layers = pick_layers(config, model.config)
    if not isinstance(layers, NativeLayers) or model.config.sliding_window is not None:
        raise BenchError("the padded reference needs the CPU kernels and a model without a sliding window")
    decoder = layers.decoder(model.config, model.weights, config.dtype)
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
        "requests": {kind: found.means() for kind, found in kinds.items()}, "points": points,
    }  # fmt: skip


def requests(args: argparse.Namespace, model: LoadedModel, rng: np.random.Generator) -> dict[str, Requests]:
    """Requests by kind. Raises OSError or ValueError."""
    answers = read_lengths(args.answers).output if args.answers else None
    read = lambda path: spin_requests.read(path, model.tokenizer, answers, args.context, rng)  # noqa: E731
    named = {"Alpaca": args.alpaca, "chat prompts": args.chat}
    kinds = {name: read(path) for name, path in named.items() if path}
    if args.mixed:
        kinds["mixed"] = spin_requests.mixed([*kinds.values(), *map(read, args.mixed)])
    return kinds or {"built-in": spin_requests.built_in(model.tokenizer, rng)}


@dataclass(frozen=True, slots=True)
class Decomposition:
    """SPIN's request decomposition (§V-A): KV in `rows` rows of `length` positions (L), in total `padded` of padding.

    The engine needs no L; the search for it shows how close the engine is to the best one.
    """

    length: int
    rows: int
    padded: int


def best(lengths: np.ndarray, width: int, unit: int = 1) -> Decomposition:
    """The decomposition with the fewest padded positions in at most `width` rows.

    lengths `[requests]`: KV lengths; each row belongs to one request. Tries all multiples of `unit` up to the longest
    request; ties go to the largest L, which has the fewest rows. Raises ValueError if there are fewer rows than
    requests.
    """
    if width < len(lengths):
        raise ValueError(f"{width} rows are too few for {len(lengths)} requests")
    tried = unit * np.arange(-(-int(lengths.max()) // unit), 0, -1)
    rows = (-(-lengths // tried[:, None])).sum(1)
    padded = rows * tried - lengths.sum()
    i = int(np.argmin(np.where(rows <= width, padded, np.iinfo(padded.dtype).max)))
    return Decomposition(int(tried[i]), int(rows[i]), int(padded[i]))


class Comparison:
    """Verifies batches in each way over the same KV, in alternating turns."""

    def __init__(self, shared: Shared, layers: NativeLayers, args: argparse.Namespace, rng: np.random.Generator):
        self._shared, self._layers, self._args, self._rng = shared, layers, args, rng
        self._source = different_pages(shared.config, shared.page_size, args.seed)

    def point(self, batches: Sequence[Batch], advance: Callable[[], None]) -> list[dict[str, Any]]:
        """Measurements of each of these batches, which all have the same size."""
        size, page = len(batches[0].nodes), self._shared.page_size
        pages = [batch.pages(page) for batch in batches]
        longest, total = max(int(n.max()) for n in pages), max(int(n.sum()) for n in pages)
        tokens = {bucket(batch) for batch in batches}
        packed = Steps(self._shared, self._layers, tokens, size, longest, total)
        # Padding the queries to the width of the batch may cross the end of a request's last page.
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
        used = [row[:n] for row, n in zip(rows, batch.pages(page), strict=True)]
        numbers = np.concatenate(used)
        places = self._rng.permutation(packed.room)[: len(numbers)].astype(np.int32)  # packed pages are not contiguous
        content, packed_live = np.zeros(packed.room, np.int32), np.zeros((packed.room, page), bool)
        content[places], packed_live[places] = numbers, live[numbers]
        tables = np.split(places, np.cumsum([len(one) for one in used])[:-1])
        drafts = [self._rng.integers(self._shared.config.vocab_size, size=n) for n in batch.nodes.tolist()]

        def trees(pages: Iterable[np.ndarray]) -> list[Tree]:
            return [chain(*one) for one in zip(drafts, batch.committed.tolist(), pages, strict=True)]

        packed_kv = filled(self._source, content, packed_live)
        padded_kv = filled(self._source, rows.reshape(-1), live)
        return {
            PACKED: Way(packed, packed.pack(trees(tables), bucket(batch)), packed_kv),
            KV_PADDED: Way(padded, padded.pack(trees(rows), bucket(batch)), padded_kv),
            PADDED: Way(padded, padded.pack(widened(trees(rows), batch.width), batch.width * size), padded_kv),
        }

    def _measured(self, batch: Batch, ways: Mapping[str, Way]) -> dict[str, Any]:
        """Median milliseconds per step including the read of its result, bytes of temporaries, and the share of nodes
        at which each way samples the same token as the packed one."""
        rows = {name: way.rows(batch.nodes) for name, way in ways.items()}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(WARM_UP + self._args.runs):
            for name, way in ways.items():
                begun = perf_counter()
                np.asarray(way.steps.run(way.packed).decision)
                if i >= WARM_UP:
                    times[name].append(1e3 * (perf_counter() - begun))
        return {
            "ms": {name: float(np.median(ms)) for name, ms in times.items()},
            "temporaries": {name: way.steps.temporaries(way.packed) for name, way in ways.items()},
            "same_choices": {name: float((tokens == rows[PACKED]).mean()) for name, tokens in rows.items()},
        }

    def _sizes(self, batch: Batch) -> dict[str, Any]:
        """Positions and tokens that each way reads and computes, its KV bytes, and the result of SPIN's search."""
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
            # The kernel scores whole vectors of keys, but reads only the values of real positions.
            "values": of(int(batch.committed.sum()), size * int(batch.committed.max())),
            "elsewhere": XlaLayers().positions_read(batch.committed, page),
            "tokens": {PACKED: tokens, KV_PADDED: tokens, PADDED: size * batch.width},
            "kv_bytes": of(position * page * int(batch.pages(page).sum()), position * size * int(batch.room.max())),
            "search": {"ms": 1e3 * seconds, "any": asdict(freely), "lanes": asdict(by_lanes)},
        }  # fmt: skip


def bucket(batch: Batch) -> int:
    """The engine's step size for the batch, in tokens."""
    tokens = int(batch.nodes.sum())
    return next((b for b in CPU.tokens if b >= tokens), tokens)
