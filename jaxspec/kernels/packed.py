"""Writes matrices as the CPU kernels read them: in panels of 32 columns, each in the format of the checkpoint.

A buffer holds the matrices of all layers: a header, for each layer and panel its place and format, and the panels.
packed.h describes the formats. A panel whose columns are stored in several formats, or in one that the kernels do not
read, is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.models.load.stored import StoredMatrix, fused_shape

#: Columns of a panel, rows of a group and of a superblock.
PANEL, GROUP, SUPER = 32, 32, 256
#: Kinds of `StoredMatrix` that the kernels read, in the order of `enum Format`.
FORMATS = ("F32", "BF16", "F16", "I8", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_MAGIC, _ALIGN = 0x314B504A, 64


def pack(layers: Sequence[Sequence[StoredMatrix]]) -> np.ndarray:
    """Pack the matrices of each layer, given in parts `[out, in]` to be fused along `out`. Returns uint8 `[bytes]`.

    The buffer is aligned so that JAX uses it without a copy. One part at a time is read. `in` is padded to a multiple
    of 32 and `out` to whole panels, with zeros. Raises `ValueError` if layers or parts differ in size.
    """
    sizes = {fused_shape(parts) for parts in layers}
    if len(sizes) != 1:
        raise ValueError(f"layers of different sizes {sorted(sizes)} cannot share a buffer")
    depth, width = sizes.pop()
    panels, padded = -(-width // PANEL), -(-depth // GROUP) * GROUP
    runs = [list(_runs(parts, depth, panels)) for parts in layers]
    entries = np.zeros((len(layers), panels, 2), np.uint32)
    place = -(-(_ALIGN + entries.nbytes) // _ALIGN) * _ALIGN
    for layer, found in enumerate(runs):
        for run in found:
            size = _panel_bytes(run.kind, padded)
            places = place + size * np.arange(run.panels)
            entries[layer, run.first : run.first + run.panels, 0] = places // _ALIGN
            entries[layer, run.first : run.first + run.panels, 1] = FORMATS.index(run.kind)
            place += size * run.panels
    out = _aligned(place)
    out[: int(entries[0, 0, 0]) * _ALIGN] = 0
    out[:16] = np.asarray([_MAGIC, len(layers), panels, padded], np.uint32).view(np.uint8)
    out[_ALIGN : _ALIGN + entries.nbytes] = entries.reshape(-1).view(np.uint8)
    for layer, found in enumerate(runs):
        for run in found:
            begin = int(entries[layer, run.first, 0]) * _ALIGN
            size = _panel_bytes(run.kind, padded)
            to = out[begin : begin + run.panels * size].reshape(run.panels, size)
            _WRITERS.get(run.kind, _blocks)(to, run, padded)
    return out


@dataclass(frozen=True)
class _Run:
    """Consecutive panels of one format: the first panel, their number, and their columns in parts `[out, in]`."""

    kind: str
    first: int
    panels: int
    parts: Sequence[StoredMatrix]

    def floats(self, depth: int) -> np.ndarray:
        """The weights as float32 `[panels * 32, depth]`."""
        rows = [part.floats() for part in self.parts]
        return _padded(np.concatenate(rows) if len(rows) > 1 else rows[0], self.panels, depth)

    @property
    def part(self) -> StoredMatrix:
        """The stored matrix, of weights that consist of one. Raises `ValueError` for several."""
        (part,) = self.parts
        return part


def _runs(parts: Sequence[StoredMatrix], depth: int, panels: int) -> Iterator[_Run]:
    """Cut fused parts into runs: the whole panels of each part, and between them panels with columns of several."""
    ends = np.cumsum([part.shape[0] for part in parts]).tolist()
    first = 0
    while first < panels:
        begin = first * PANEL
        inside = next(end for end in ends if end > begin)
        # The last part's last panel is padded.
        count = -(-(inside - begin) // PANEL) if inside == ends[-1] else max(1, (inside - begin) // PANEL)
        end = min(begin + count * PANEL, ends[-1])
        columns = [
            part.rows(slice(max(begin - before, 0), end - before))
            for part, before, after in zip(parts, [0, *ends], ends, strict=False)
            if before < end and after > begin
        ]
        kind = columns[0].kind if len(columns) == 1 and _packable(columns[0].kind, depth) else "F32"
        yield _Run(kind, first, count, columns)
        first += count


def _packable(kind: str, depth: int) -> bool:
    return kind in FORMATS and depth % (SUPER if kind.endswith("_K") else GROUP if kind.startswith("Q") else 1) == 0


def _panel_bytes(kind: str, depth: int) -> int:
    """Bytes of a panel of `depth` rows: see packed.h."""
    groups, weights = depth // GROUP, GROUP * PANEL
    head = {"I8": 4 * PANEL, "Q4_K": groups // 8 * 4 * PANEL, "Q5_K": groups // 8 * 4 * PANEL}
    head["Q6_K"] = groups // 8 * 2 * PANEL
    scales = {"Q4_1": 4, "Q5_1": 4}.get(kind, 2 if kind.startswith("Q") else 0) * PANEL
    bits = {"F32": 32, "BF16": 16, "F16": 16, "I8": 8, "Q8_0": 8, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6}
    return head.get(kind, 0) + groups * (scales + weights * bits.get(kind, 4) // 8)


def _write_floats(to: np.ndarray, run: _Run, depth: int) -> None:
    """Rows of 32 columns of float32 or float16."""
    kind = np.float32 if run.kind == "F32" else np.float16
    values = run.floats(depth) if run.kind == "F32" else _padded(run.part.read(), run.panels, depth)
    view = to.view(kind).reshape(run.panels, depth, PANEL)
    view[:] = values.reshape(run.panels, PANEL, depth).swapaxes(1, 2)


def _write_bfloat16(to: np.ndarray, run: _Run, depth: int) -> None:
    pairs = _padded(run.part.read(), run.panels, depth).view(np.uint32)
    to.view(np.uint32).reshape(run.panels, depth // 2, PANEL)[:] = _by_panel(pairs)


def _write_int8(to: np.ndarray, run: _Run, depth: int) -> None:
    assert run.part.scale is not None
    to[:, : 4 * PANEL] = _padded(run.part.scale[:, None], run.panels, 1).view(np.uint8).reshape(run.panels, -1)
    codes = _words(_padded(run.part.read(), run.panels, depth).view(np.uint8), 8)
    to[:, 4 * PANEL :].view(np.uint32).reshape(run.panels, depth // 4, PANEL)[:] = _by_panel(codes)


def _by_panel(words: np.ndarray) -> np.ndarray:
    """`[panels * 32, words]` -> `[panels, words, 32]`."""
    return words.reshape(-1, PANEL, words.shape[1]).swapaxes(1, 2)


def _blocks(to: np.ndarray, run: _Run, depth: int) -> None:
    """GGUF's blocks: for each superblock its scales, then for each group scales, high bits and codes."""
    size = SUPER if run.kind.endswith("_K") else GROUP
    read = run.part.read()
    stored = _padded(read, run.panels, read.shape[1])
    blocks = stored.reshape(stored.shape[0], depth // size, -1)
    fields = _FIELDS[run.kind](blocks)
    target = to.reshape(run.panels, depth // size, -1)
    at = 0
    for field in fields.head:
        at = _put(target, at, field)
    for group in range(size // GROUP):
        for field in fields.groups:
            at = _put(target, at, field[:, :, group])


def _put(target: np.ndarray, at: int, field: np.ndarray) -> int:
    """Write a field `[columns, blocks, bytes]` of items of the field's data type to `target [panels, blocks, …]`.

    A column's items are 32 columns apart. Returns the place after it.
    """
    panels, blocks = target.shape[:2]
    items = field.reshape(panels, PANEL, blocks, -1).transpose(0, 2, 3, 1)
    size = items.itemsize * items.shape[2] * PANEL
    target[:, :, at : at + size] = np.ascontiguousarray(items).view(np.uint8).reshape(panels, blocks, size)
    return at + size


@dataclass(frozen=True)
class _Fields:
    """Fields of GGUF blocks in the kernels' order: `head`, each `[columns, blocks, items]`, once per block; `groups`,
    each `[columns, blocks, groups, items]`, once per group."""

    head: Sequence[np.ndarray]
    groups: Sequence[np.ndarray]


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of `bits` bits `[…, n]` uint8, packed to words `[…, n * bits / 32]` uint32: even rows in the lower half."""
    if bits == 4:  # most weights are: eight codes at a time, nine times as fast as the lines below
        lanes = np.ascontiguousarray(codes).view("<u8")
        pairs = (lanes | lanes >> np.uint64(12)).view(np.uint8)  # byte i: codes i and i + 2
        return pairs.reshape(*codes.shape[:-1], -1, 8).take([0, 4, 1, 5], -1).view(np.uint32)[..., 0]
    halves = codes.reshape(*codes.shape[:-1], -1, 16 // bits, 2).swapaxes(-1, -2)
    parts = halves.reshape(*codes.shape[:-1], -1, 8 // bits) << np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(parts, -1).view(np.uint32)


def _halves(stored: np.ndarray) -> np.ndarray:
    """Codes in the order of weights, of bytes that hold the first half's in their low and the second's in their high
    bits."""
    return np.concatenate([stored & 15, stored >> 4], -1)


def _small(minimum: bool, high: bool) -> Callable[[np.ndarray], _Fields]:
    """Q4_0, Q4_1, Q5_0, Q5_1: scale, minimum, fifth bits, nibbles."""

    def fields(blocks: np.ndarray) -> _Fields:
        heads = 4 if minimum else 2
        groups: list[np.ndarray] = [np.ascontiguousarray(blocks[..., :heads]).view(np.uint16)[:, :, None]]
        if high:
            bits = np.unpackbits(blocks[..., heads : heads + 4], axis=-1, bitorder="little")
            groups.append(_words(bits, 1)[:, :, None])
        return _Fields([], [*groups, _words(_halves(blocks[..., -16:]), 4)[:, :, None]])

    return fields


def _q8_0(blocks: np.ndarray) -> _Fields:
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.uint16)
    return _Fields([], [scale[:, :, None], _words(blocks[..., 2:], 8)[:, :, None]])


def _scales_k(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima `[…, 8]` of 6 bits from the 12 bytes that hold them."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate([a & 63, (c & 15) | (a >> 2 & 48)], -1)
    return scale, np.concatenate([b & 63, c >> 4 | (b >> 2 & 48)], -1)


def _q45_k(blocks: np.ndarray) -> _Fields:
    """Q4_K and Q5_K, whose blocks differ by the fifth bits."""
    scale, minimum = _scales_k(blocks[..., 4:16])
    codes = blocks[..., -128:].reshape(*blocks.shape[:2], 4, 32)
    groups = [scale[..., None], minimum[..., None]]
    if blocks.shape[-1] > 144:
        bits = blocks[..., 16:48, None] >> np.arange(8, dtype=np.uint8) & 1  # [columns, blocks, weight, group]
        groups.append(_words(bits.swapaxes(2, 3), 1))
    groups.append(_words(np.stack([codes & 15, codes >> 4], 3).reshape(*blocks.shape[:2], 8, 32), 4))
    return _Fields([np.ascontiguousarray(blocks[..., :4]).view(np.uint16)], groups)


def _q6_k(blocks: np.ndarray) -> _Fields:
    shape = blocks.shape[:2]
    low = blocks[..., :128].reshape(*shape, 2, 2, 32)
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> np.asarray([0, 2, 4, 6], np.uint8)[:, None] & 3
    low = np.concatenate([low & 15, low >> 4], -2).reshape(*shape, 8, 32)
    scale = blocks[..., 192:208].reshape(*shape, 8, 2)
    groups = [scale, _words(high.reshape(*shape, 8, 32), 2), _words(low, 4)]
    return _Fields([np.ascontiguousarray(blocks[..., 208:]).view(np.uint16)], groups)


_WRITERS: dict[str, Callable[[np.ndarray, _Run, int], None]] = {
    "F32": _write_floats, "F16": _write_floats, "BF16": _write_bfloat16, "I8": _write_int8,
}  # fmt: skip
_FIELDS: dict[str, Callable[[np.ndarray], _Fields]] = {
    "Q4_0": _small(False, False), "Q4_1": _small(True, False), "Q5_0": _small(False, True),
    "Q5_1": _small(True, True), "Q8_0": _q8_0, "Q4_K": _q45_k, "Q5_K": _q45_k, "Q6_K": _q6_k,
}  # fmt: skip


def _padded(values: np.ndarray, panels: int, depth: int) -> np.ndarray:
    """Values `[rows, items]` padded with zeros to `[panels * 32, depth]`, contiguous."""
    rows, items = values.shape
    if (rows, items) != (panels * PANEL, depth):
        values = np.pad(values, ((0, panels * PANEL - rows), (0, depth - items)))
    return np.ascontiguousarray(values)


def _aligned(size: int) -> np.ndarray:
    """`size` uninitialised bytes, aligned to 64."""
    raw = np.empty(size + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + size]
