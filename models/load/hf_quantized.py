"""Quantised Hugging Face checkpoints whose weights are numbers of 8 bits with scales: FP8 and INT8.

The weights are as the checkpoint has them. Activations are not quantised, unlike in some other engines. INT8 with a
scale per output stays INT8 in the native CPU kernels; everything else is widened to float32 when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jaxspec.errors import ModelLoadError
from jaxspec.models.load.stored import StoredMatrix
from jaxspec.models.load.weights import TensorSource

#: Methods whose weights are packed in fewer bits, and what to use instead.
_REFUSED = {
    "awq": "a Q4_K_M .gguf", "gptq": "a Q4_K_M .gguf", "mxfp4": "a .gguf", "bitsandbytes": "a Q4_K_M or Q8_0 .gguf",
    "auto-round": "a Q4_K_M .gguf", "hqq": "a Q4_K_M .gguf",
}  # fmt: skip
#: Types of weights with scales, as safetensors names them.
NARROW = {"I8": np.int8, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
#: Ends of the names of tensors that belong to a weight.
_SCALES = ("_scale_inv", "_scale")
_OTHERS = (".input_scale", ".output_scale", ".weight_shape", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class Quantization:
    """`block`: rows and columns of a weight that share a scale; None: a scale per output, or one."""

    method: str
    block: tuple[int, int] | None = None


def quantization(raw: Mapping[str, Any], where: str) -> Quantization | None:
    """How the weights of a `config.json` are quantised; None: not at all. Raises `ModelLoadError` if that cannot be
    read, with what to use instead."""
    settings = raw.get("quantization_config")
    if not settings:
        return None
    method = str(settings.get("quant_method", "an unknown method"))
    if method == "fp8":
        block = settings.get("weight_block_size")
        return Quantization(method, None if block is None else (int(block[0]), int(block[1])))
    if method == "fbgemm_fp8":
        return Quantization(method)
    if method == "compressed-tensors":
        for name, group in (settings.get("config_groups") or {}).items():
            weights = (group or {}).get("weights") or {}
            bits, strategy, symmetric = (weights.get(key) for key in ("num_bits", "strategy", "symmetric"))
            if bits != 8 or strategy not in ("channel", "tensor") or symmetric is False:
                raise ModelLoadError(
                    f"{where}: quantization_config.config_groups.{name}: weights of {bits} bits with a scale per "
                    f"{strategy} are not supported; symmetric ones of 8 bits with one per channel or tensor are. Use "
                    "the original weights or a .gguf"
                )
        if str(settings.get("format", "")).startswith(("pack", "marlin", "nvfp4", "mxfp4")):
            raise ModelLoadError(f"{where}: quantization_config.format {settings['format']!r}: use a Q8_0 .gguf")
        return Quantization(method)
    instead = _REFUSED.get(method, "a .gguf")
    raise ModelLoadError(
        f"{where}: weights quantised by {method} cannot be read; use the original weights or {instead}"
    )


class Tensors(TensorSource, Protocol):
    """Tensors that may be numbers of 8 bits: see `SafetensorsFolder`."""

    def kind(self, name: str) -> str:
        """A tensor's type, as safetensors names it."""
        ...

    def raw(self, name: str) -> np.ndarray:
        """A tensor in its stored dtype, float8 and int8 too."""
        ...


class Dequantized:
    """The weights of a quantised checkpoint as a `TensorSource`, without the tensors of their scales."""

    def __init__(self, tensors: Tensors, scheme: Quantization, where: str):
        self._tensors, self._scheme, self._where = tensors, scheme, where
        self._scales = {
            name: scale
            for name in tensors.shapes
            for end in _SCALES
            if name.endswith(".weight") and (scale := name + end) in tensors.shapes
        }
        used = {*self._scales.values()}
        self._shapes = {n: s for n, s in tensors.shapes.items() if n not in used and not n.endswith(_OTHERS)}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def check(self, name: str) -> None:
        if name not in self._scales:
            self._tensors.check(name)
            return
        if (kind := self._tensors.kind(name)) not in NARROW:
            known = ", ".join(NARROW)
            raise ModelLoadError(f"{self._where}: {name} has a scale, but is of type {kind}; {known} can be read")
        shape, scale = self._shapes[name], self._tensors.shapes[self._scales[name]]
        wanted: list[tuple[int, ...]] = [(), (1,), (1, 1), (shape[0],), (shape[0], 1)]
        if self._scheme.block is not None:
            rows, columns = self._scheme.block
            wanted = [(-(-shape[0] // rows), -(-shape[1] // columns))]
        if scale not in wanted:
            raise ModelLoadError(f"{self._where}: {self._scales[name]} has the shape {list(scale)}, which does not fit")

    def read(self, name: str) -> np.ndarray:
        if name not in self._scales:
            return self._tensors.read(name)
        codes, scale = self._tensors.raw(name).astype(np.float32), self._scale_of(name)
        if self._scheme.block is None:
            return codes * scale.reshape(-1, 1)
        rows, columns = self._scheme.block
        wide = np.repeat(np.repeat(scale, rows, 0), columns, 1)
        return codes * wide[: codes.shape[0], : codes.shape[1]]

    def matrix(self, name: str) -> StoredMatrix:
        if name not in self._scales:
            return self._tensors.matrix(name)
        rows, columns = self._shapes[name]
        if self._scheme.block is None and (codes := self._tensors.raw(name)).dtype == np.int8:
            return StoredMatrix.int8(codes, np.broadcast_to(self._scale_of(name).reshape(-1), (rows,)).copy())
        return StoredMatrix.read_by(lambda: self.read(name), (rows, columns))

    def _scale_of(self, name: str) -> np.ndarray:
        return np.asarray(self._tensors.raw(self._scales[name]), np.float32)
