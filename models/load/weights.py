"""Maps a checkpoint's tensors to the engine's weights: fused, matrices `[in, out]`, each read when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Protocol

import numpy as np

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.layout import Layout
from jaxspec.models.load.parts import EXPERTS, MATRICES, ONCE, fused_parts, part_shapes
from jaxspec.models.load.stored import StoredMatrix

#: Most layers of a model. The largest ones have less than 200.
MAX_LAYERS = 4096
#: Weights by name: a dict, or `LazyWeights`.
Weights = Mapping[str, np.ndarray]
#: Reads one weight.
Reader = Callable[[], np.ndarray]
#: The parts of a fused matrix as they are stored.
Stored = Sequence[StoredMatrix]


class LazyWeights(Weights):
    """Weights that are read when they are used: `weights[name]` reads one weight, and nothing keeps it.

    So a model larger than the host's memory can be put on the device weight by weight. Iterating, `len` and `in` read
    nothing; `values()` and `items()` read one weight at a time, `dict(weights)` reads all. Files stay memory-mapped as
    long as this object lives, and must not be changed meanwhile. `stored`: for `stored_parts`, of matrices whose
    stored form differs from the reader's. `of_target`: names of a drafter's weights that are the target's own.
    """

    def __init__(
        self, readers: Mapping[str, Reader], stored: Mapping[str, Stored] | None = None, of_target: Iterable[str] = ()
    ):
        self._readers, self.stored, self.of_target = dict(readers), dict(stored or {}), frozenset(of_target)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:  # Mapping's would read the weight
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def watched(self, read: Callable[[str], None]) -> LazyWeights:
        """These weights, with `read` called with a weight's name when it is first read, also in its stored form."""
        seen: set[str] = set()

        def reading(name: str, reader: Reader) -> np.ndarray:
            name = name if name in self._readers else name.rsplit(".", 1)[0]  # of an expert's matrix
            if name not in seen:
                seen.add(name)
                read(name)
            return reader()

        readers = {name: partial(reading, name, reader) for name, reader in self._readers.items()}
        stored = {
            name: [replace(part, read=partial(reading, name, part.read)) for part in parts]
            for name, parts in self.stored.items()
        }
        return LazyWeights(readers, stored)


def readers_of(weights: Weights) -> dict[str, Reader]:
    """A reader of each weight, from which to make other `LazyWeights`."""
    return {name: partial(weights.__getitem__, name) for name in weights}


def stored_of(weights: Weights) -> dict[str, Stored]:
    """`LazyWeights.stored` of any weights."""
    return weights.stored if isinstance(weights, LazyWeights) else {}


def of_target(weights: Weights) -> frozenset[str]:
    """`LazyWeights.of_target` of any weights."""
    return weights.of_target if isinstance(weights, LazyWeights) else frozenset()


def stored_parts(weights: Weights, name: str, shape: tuple[int, int]) -> Stored:
    """A matrix in its stored form, as parts `[out, in]` to be fused along `out`; `shape` is `(out, in)`.

    The embedding is `[vocab, hidden]`; the matrix of expert e is `NAME.e`. Where only the weight itself is known, that
    is one part, read when it is used.
    """
    if parts := stored_of(weights).get(name):
        return parts

    def read() -> np.ndarray:
        if name not in weights:  # one of the matrices of a weight `[experts, in, out]`
            of_all, expert = name.rsplit(".", 1)
            return np.asarray(weights[of_all][int(expert)]).T
        matrix = np.asarray(weights[name])
        return matrix if name == "embed" else matrix.T

    return [StoredMatrix.read_by(read, shape)]


class TensorSource(Protocol):
    """The tensors of a checkpoint as stored, matrices `[out, in]`."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name -> shape."""
        ...

    def check(self, name: str) -> None:
        """Raise `ModelLoadError` unless `read` supports the tensor's type. Does not read the tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Read a tensor in its stored dtype; float64 and quantised tensors as float32."""
        ...

    def matrix(self, name: str) -> StoredMatrix:
        """A tensor of two axes in its stored form."""
        ...


def check_tensors(
    config: DecoderConfig, source: TensorSource, layout: Layout, ignored: Iterable[str], where: str
) -> None:
    """Raise `ModelLoadError` naming tensors that are missing, unexpected, or of the wrong shape or type.

    Reads no tensor.
    """
    c = config
    width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    # Loops and tables have these sizes before a tensor's shape is looked at.
    largest = max((prod(shape) for shape in source.shapes.values()), default=0)
    if (size := max(c.vocab_size, c.hidden_size, c.intermediate_size, width, kv_width)) > largest:
        raise ModelLoadError(f"{where}: the configuration has a size of {size:,}, no tensor is as large")
    if c.experts is not None and max(c.experts.count, c.experts.width) > largest:
        raise ModelLoadError(f"{where}: the configuration has {c.experts.count:,} experts, no tensor is as large")
    if c.num_heads % c.num_kv_heads or c.rotated % 2:
        rotated = "" if c.rotary_dim is None else f", of which {c.rotated} dimensions are rotated,"
        raise ModelLoadError(
            f"{where}: {c.num_heads} heads of {c.head_dim}{rotated} don't fit {c.num_kv_heads} key-value heads"
        )
    wanted = dict(_tensors(config, layout))
    if missing := sorted(wanted.keys() - source.shapes.keys()):
        raise ModelLoadError(f"{where}: {_listed(missing)} missing; is the download complete?")
    unknown = source.shapes.keys() - wanted.keys() - set(ignored)
    if extra := sorted(name for name in unknown if not name.endswith(layout.ignored)):
        raise ModelLoadError(
            f"{where}: unexpected {_listed(extra)}; the configuration describes a {config.family} decoder without it"
        )
    for name, shape in wanted.items():
        if source.shapes[name] != shape:
            raise ModelLoadError(
                f"{where}: tensor {name} has shape {list(source.shapes[name])}, the configuration says {list(shape)}"
            )
        source.check(name)


def _tensors(config: DecoderConfig, layout: Layout) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor. A tensor with several parts is named once for each."""
    count = config.experts.count if config.experts is not None else 0
    for part, shape in part_shapes(config).items():
        rows = layout.rows_of(part, config)
        stored = shape if rows is None else (rows.total, *shape[1:])
        stored = stored[::-1] if part in layout.transposed else stored[1:] if part in layout.flat else stored
        places = layout.names[part].count("{}")
        each = part.startswith("expert_")
        if each and places < 2:  # the experts of a layer in one tensor
            stored = (count, *stored)
        for layer in range(config.num_layers if places else 1):
            for expert in range(count if each and places == 2 else 1):
                yield layout.name(part, layer, expert), stored


def lazy_weights(config: DecoderConfig, source: TensorSource, layout: Layout) -> LazyWeights:
    """The fused weights of a checkpoint that passed `check_tensors`.

    A weight has the dtype in which its tensors are stored, float32 if these differ. Matrices are transposed views: the
    copy to the device is then the only one that reorders them.
    """
    reader = _PartReader(config, source, layout)
    shapes, fused = part_shapes(config), fused_parts(config)
    readers = {name: partial(reader.weight, (name,), 0) for name in ONCE if name in shapes}
    stored: dict[str, Stored] = {name: [reader.matrix(name, 0)] for name in ("embed", "head") if name in shapes}
    for i in range(config.num_layers):
        for name, parts in fused.items():
            key = f"layers.{i}.{name}"
            if name in EXPERTS:
                readers[key] = partial(reader.experts, parts, i)
                stored |= {f"{key}.{e}": reader.matrices(parts, i, e) for e in range(reader.count)}
            else:
                readers[key] = partial(reader.weight, parts, i)
                if name in MATRICES:
                    stored[key] = reader.matrices(parts, i)
    return LazyWeights(readers, stored)


class _PartReader:
    """Reads parts of a checkpoint as its layout says."""

    def __init__(self, config: DecoderConfig, source: TensorSource, layout: Layout):
        self._config, self._source, self._layout = config, source, layout
        #: Experts of a layer.
        self.count = config.experts.count if config.experts is not None else 0

    def weight(self, parts: Sequence[str], layer: int) -> np.ndarray:
        """Vector, or matrix `[in, out]`, fused from these parts; tables as they are stored."""
        weight = joined([self._tensor(part, layer) for part in parts])
        return weight if parts[0] in ("embed", "positions") else weight.T  # of a vector the vector itself

    def experts(self, parts: Sequence[str], layer: int) -> np.ndarray:
        """The matrices `[experts, in, out]` of all experts of a layer."""
        if self._stacked(parts[0]):  # read once, not once for each expert
            whole = [self._source.read(self._layout.name(part, layer)) for part in parts]
            return np.concatenate(whole, 1).swapaxes(1, 2)
        return np.stack([joined([self._tensor(part, layer, e) for part in parts]).T for e in range(self.count)])

    def matrices(self, parts: Sequence[str], layer: int, expert: int = 0) -> Stored:
        return [self.matrix(part, layer, expert) for part in parts]

    def matrix(self, part: str, layer: int, expert: int = 0) -> StoredMatrix:
        """A part in its stored form. One that is stored `[in, out]` cannot stay as small as it is."""
        layout, name = self._layout, self._layout.name(part, layer, expert)
        if part in layout.transposed or part in layout.flat:
            out, depth = part_shapes(self._config)[part]
            return StoredMatrix.read_by(partial(self._tensor, part, layer, expert), (out, depth))
        found = self._source.matrix(name)
        if self._stacked(part):
            size = found.shape[0] // self.count
            found = found.rows(slice(expert * size, (expert + 1) * size))
        rows = layout.rows_of(part, self._config)
        return found if rows is None else found.rows(rows.places)

    def _tensor(self, part: str, layer: int, expert: int = 0) -> np.ndarray:
        """A part `[out, in]` or `[out]`."""
        layout = self._layout
        stored = self._source.read(layout.name(part, layer, expert))
        if part in layout.transposed:
            stored = stored.T
        if part in layout.flat:
            stored = stored[None]
        if (rows := layout.rows_of(part, self._config)) is not None:
            stored = stored[rows.places]
        return stored.astype(np.float32) + 1 if part in layout.plus_one else stored

    def _stacked(self, part: str) -> bool:
        """Whether the experts of a layer are in one tensor."""
        return part.startswith("expert_") and self._layout.names[part].count("{}") < 2


def joined(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate along the first axis, in the common dtype, or in float32, which holds all others exactly."""
    if len(tensors) == 1:
        return tensors[0]
    dtype = tensors[0].dtype if len({t.dtype for t in tensors}) == 1 else np.float32
    return np.concatenate([t.astype(dtype, copy=False) for t in tensors])


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:100] for name in names[:3])
    return (
        f"tensor {shown}"
        if len(names) == 1
        else f"tensors {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    )
