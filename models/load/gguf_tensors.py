"""The tensors of a GGUF file, memory-mapped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.errors import ModelLoadError
from jaxspec.models.load.stored import FLOATS, StoredMatrix, dequantized

if TYPE_CHECKING:  # importing it takes time, and a cached header needs none of it
    from gguf import ReaderTensor


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's GGUF type, shape with the innermost axis last, and place in the file in bytes."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @classmethod
    def of(cls, tensor: ReaderTensor) -> TensorInfo:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        return cls(tensor.tensor_type.name, shape, int(tensor.data_offset), int(tensor.n_bytes))


class GGUFTensors:
    """The tensors of a GGUF file."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]):
        self._path, self.tensors = path, dict(tensors)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def check(self, name: str) -> None:
        """Raise `ModelLoadError` unless the tensor's type is supported."""
        if not _readable(kind := self.tensors[name].kind):
            raise ModelLoadError(f"{self._path}: tensor {name} is quantised as {kind}, which can't be read")

    def read(self, name: str) -> np.ndarray:
        """Read a tensor, dequantised to float32."""
        self.check(name)
        tensor = self.tensors[name]
        values = dequantized(self._data(tensor), tensor.kind).reshape(tensor.shape)
        # Float32 tensors are views of the file, which arrays on the device must not share.
        return values.copy() if tensor.kind == "F32" else values

    def matrix(self, name: str) -> StoredMatrix:
        tensor = self.tensors[name]
        rows, columns = prod(tensor.shape[:-1]), tensor.shape[-1]
        return StoredMatrix(tensor.kind, (rows, columns), lambda: self._data(tensor).reshape(rows, -1))

    def _data(self, tensor: TensorInfo) -> np.ndarray:
        """Numbers, or quantised blocks `[…, bytes]`, as a view of the file."""
        # Mapped for each tensor, so that the pages that were read do not stay mapped.
        data = np.memmap(self._path, np.uint8, "r", tensor.offset, tensor.size)
        if tensor.kind in FLOATS:
            return data.view(FLOATS[tensor.kind]).reshape(tensor.shape)
        return data.reshape(*tensor.shape[:-1], -1)


@cache
def _readable(kind: str) -> bool:
    """Whether the `gguf` package can dequantise the type: try it with one block of zeros."""
    if kind in FLOATS:
        return True
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        dequantized(np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
