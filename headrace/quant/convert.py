"""Chooses the number format of each matrix, with a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from headrace.errors import ConfigError
from headrace.kernels import native
from headrace.kernels.native import NativeKernels
from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.quant.float_codes import TileCodes
from headrace.quant.fp8 import Fp8BlockMethod, Fp8Method
from headrace.quant.groups import GroupCodes
from headrace.quant.hybrid import HybridMethod
from headrace.quant.int4 import Int4Method
from headrace.quant.int8 import Int8Method
from headrace.quant.native import NativeMethod
from headrace.quant.packed import PackedMethod, kept_codes

BITS = {"int4": 4, "int8": 8}
FP8: Mapping[str, type[Fp8Method] | None] = {"fp8": Fp8Method, "fp8_per_block": Fp8BlockMethod, "stored": None}
"""Quantization -> method to which floats are rounded; None: they stay floats, and only codes of a checkpoint are kept."""
INT4_ROWS = 16
"""Most rows for which PyTorch's packed int4 product is faster than a bfloat16 one (two Zen 4 cores, milliseconds of the
products of a step of the embedded model: 14 and 26 at 8 rows, 27 and 31 at 16, 53 and 41 at 32)."""
INT8_ROWS = 6
"""Most rows for its packed int8 product (12 and 23 at 4 rows, 28 and 26 at 8)."""
AMX_ROWS = 32
"""Rows above which a CPU with AMX multiplies bfloat16 faster than any CPU multiplies bytes: by its peak rate, which is
eight times that of the vector units; to be measured on such a machine."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The format of one layer."""

    format: str
    reason: str
    error: float
    """Root mean square of (held - exact weights) over that of the exact ones."""


class Converter(Protocol):
    """Swaps the methods of layers for those of another number format."""

    packs_head: bool
    """Whether the output head is converted too."""

    def convert(self, name: str, layer: Linear, parts: Sequence[StoredMatrix], *, is_head: bool = False) -> Conversion:
        """Loads the layer's weights on its device, by another method where one holds them.

        Args:
            name: of the layer, for errors.
            parts: the stored matrices, one below the other.
            is_head: whether it is the output head.

        Raises:
            ConfigError: no packed kernel takes a matrix of this shape on this device.
        """
        ...


def converter(quantization: str) -> Converter:
    """Returns the converter for a quantization of ``EngineConfig`` other than none."""
    if quantization in FP8:
        return Fp8Converter(FP8[quantization])
    return IntegerConverter(quantization, native.load())


class Fp8Converter:
    """Keeps FP8 as it is stored, and rounds floats to it where asked to. The output head stays in floats.

    Args:
        online: method to which floats are rounded; None: they stay floats.
    """

    packs_head = False

    def __init__(self, online: type[Fp8Method] | None) -> None:
        self._online = online

    def convert(self, name: str, layer: Linear, parts: Sequence[StoredMatrix], *, is_head: bool = False) -> Conversion:
        kinds = " and ".join(dict.fromkeys(part.kind for part in parts))
        method, why = self._method(layer, parts)
        if method is None:
            layer.method.load(layer, parts)
            return Conversion(layer.method.format, f"stored as {kinds}; {why}", 0.0)
        weight = layer.weight
        return _swap(layer, method, weight.dtype, weight.device, parts, f"stored as {kinds}{why}")

    def _method(self, layer: Linear, parts: Sequence[StoredMatrix]) -> tuple[Fp8Method | None, str]:
        """Returns the method and why it was chosen; None: the weights stay floats, for that reason."""
        shape = layer.in_features, layer.out_features, layer.weight.device.type
        tiles = [part.codes for part in parts if isinstance(part.codes, TileCodes)]
        if len(tiles) == len(parts):
            kept = [kind for kind in (Fp8Method, Fp8BlockMethod) if all(kind.holds(tile) for tile in tiles)]
            if not kept:
                return None, "no kernel here multiplies by scales of such tiles"
            reasons = kept[0].supports(*shape)
            return (None, reasons[0]) if reasons else (kept[0](), ", whose numbers are kept")
        if self._online is None:
            return None, "not all of it has codes" if tiles else "which is kept"
        reasons = self._online.supports(*shape)
        return (None, reasons[0]) if reasons else (self._online(), ", rounded to FP8")


class IntegerConverter:
    """Packs weights for CPUs.

    Args:
        quantization: int4 or int8: bits of matrices that the checkpoint does not say more about.
        kernels: the native ones, if there are.
    """

    packs_head = True

    def __init__(self, quantization: str, kernels: NativeKernels | None) -> None:
        if quantization not in BITS:
            raise ConfigError(f"quantization must be one of none, {', '.join(BITS)}, not {quantization!r}", "quantization")
        self._quantization = quantization
        # Without vector instructions of its own the native product is slower than PyTorch's.
        self._kernels = kernels if kernels is not None and kernels.tile != "portable" else None

    def convert(self, name: str, layer: Linear, parts: Sequence[StoredMatrix], *, is_head: bool = False) -> Conversion:
        """Codes of the output head have 8 bits, since its errors go straight into the logits."""
        bits = max(self._bits(part, is_head) for part in parts)
        why = self._reason(parts, bits, is_head)
        shape, dtype, device = (layer.in_features, layer.out_features), layer.weight.dtype, layer.weight.device
        if self._kernels is not None and not NativeMethod.supports(*shape, device.type):
            method: PackedMethod = NativeMethod(self._kernels, bits)
            if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
                method = HybridMethod(method, AMX_ROWS)
            try:
                return _swap(layer, method, dtype, device, parts, why)
            except OverflowError:
                pass  # PyTorch's formats have wider scales.
        kind = Int4Method if bits == 4 else Int8Method
        if reasons := kind.supports(*shape, device.type):
            raise ConfigError(f"{self._quantization} cannot hold {name}: {reasons[0]}; set quantization none", "quantization")
        if bits == 8:
            why += "; PyTorch's int8 kernel has one scale for each output"
        return _swap(layer, HybridMethod(kind(), INT4_ROWS if bits == 4 else INT8_ROWS), dtype, device, parts, why)

    def _bits(self, part: StoredMatrix, is_head: bool) -> int:
        """4 for what is stored with 4 bits, 8 for what is stored with more; floats as asked."""
        if is_head or self._quantization == "int8" or part.kind == "Q6_K":
            return 8
        return part.codes.bits if isinstance(part.codes, GroupCodes) else BITS[self._quantization]

    def _reason(self, parts: Sequence[StoredMatrix], bits: int, is_head: bool) -> str:
        kinds = " and ".join(dict.fromkeys(part.kind for part in parts))
        if all(kept_codes(part, bits) is not None for part in parts):
            why = f"stored as {kinds}, whose integers are kept"
        else:
            why = f"stored as {kinds}, rounded to {bits} bits"
        return why + ("; the output head is always of 8 bits" if is_head and self._quantization == "int4" else "")


def _swap(
    layer: Linear, method: PackedMethod, dtype: torch.dtype, device: torch.device, parts: Sequence[StoredMatrix], why: str
) -> Conversion:
    method.allocate(layer, dtype, device)
    error = method.load(layer, parts)
    layer.method = method
    return Conversion(method.format, why, error)
