"""Which number format a matrix gets, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from headrace.errors import ConfigError
from headrace.kernels.native import NativeKernels
from headrace.layers.linear import Linear
from headrace.quant import int4, int8, native
from headrace.quant.groups import GroupCodes, concatenate, relative_error, round_to_groups
from headrace.quant.hybrid import HybridLinear
from headrace.quant.int4 import Int4Linear
from headrace.quant.int8 import Int8Linear
from headrace.quant.native import NativeLinear
from headrace.quant.packed import PackedLinear

BITS = {"int4": 4, "int8": 8}
INT4_ROWS = 16
"""Up to so many rows PyTorch's packed int4 product is faster than a bfloat16 one (two Zen 4 cores, milliseconds of the
products of a step of the embedded model: 14 and 26 at 8 rows, 27 and 31 at 16, 53 and 41 at 32)."""
INT8_ROWS = 6
"""Likewise for its packed int8 product (12 and 23 at 4 rows, 28 and 26 at 8)."""
AMX_ROWS = 32
"""Rows above which a CPU with AMX multiplies bfloat16 faster than any CPU multiplies bytes: by its peak rate, which is
eight times that of the vector units; to be measured on such a machine."""
_SAMPLED_ROWS = 256
"""Rows that an error is computed over, evenly spread."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One stored tensor of a matrix."""

    kind: str
    """What it is stored as."""
    codes: GroupCodes | None
    """Its integers, where it is stored as groups of 32."""
    read: Callable[[], torch.Tensor]
    """Its floats."""

    def exact(self) -> torch.Tensor:
        """``[N, K]``"""
        return self.codes.dequantize() if self.codes is not None else self.read()


@dataclasses.dataclass(frozen=True)
class Conversion:
    module: PackedLinear
    reason: str
    error: float
    """Root mean square of (held - exact weights) over that of the exact ones."""


class Converter:
    """Packs matrices of one model.

    Args:
        quantization: int4 or int8: bits of matrices that the checkpoint does not say more about.
        kernels: the native ones, if there are.
    """

    def __init__(self, quantization: str, kernels: NativeKernels | None) -> None:
        if quantization not in BITS:
            raise ConfigError(f"quantization must be one of none, {', '.join(BITS)}, not {quantization!r}", "quantization")
        self._quantization = quantization
        # Without vector instructions of its own the native product is slower than PyTorch's.
        self._kernels = kernels if kernels is not None and kernels.tile != "portable" else None

    def convert(self, name: str, linear: Linear, pieces: Sequence[Piece], *, is_head: bool = False) -> Conversion:
        """The module that takes the place of ``linear``, whose bias it takes over.

        Args:
            name: of the module, for errors.
            pieces: the stored tensors, one below the other.
            is_head: the output head, whose codes have 8 bits: its errors go straight into the logits.

        Raises:
            ConfigError: no packed kernel takes a matrix of this shape, or of this dtype.
        """
        bits = max(self._bits(piece, is_head) for piece in pieces)
        why = self._reason(pieces, bits, is_head)
        bias = None if linear.bias is None else linear.bias.data
        shape = (linear.in_features, linear.out_features)
        if self._kernels is not None and native.misfit(*shape) is None:
            weights = _codes(pieces, bits, torch.float16, anchor=0)
            if _fits_half(weights):
                module: PackedLinear = NativeLinear(weights, bias, self._kernels)
                module = self._with_copy(module, pieces, linear.weight.dtype)
                return Conversion(module, why, _error(native.held(weights), pieces))
        misfit = (int4 if bits == 4 else int8).misfit(*shape)
        if misfit is not None:
            raise ConfigError(f"{self._quantization} cannot hold {name}: {misfit}; set quantization none", "quantization")
        dtype = linear.weight.dtype
        copy = torch.cat([piece.exact().to(dtype) for piece in pieces])
        if bits == 4:
            weights = int4.held(_codes(pieces, 4, dtype, anchor=int4.ANCHOR), dtype)
            module = HybridLinear(Int4Linear(weights, bias, dtype), copy, INT4_ROWS)
            return Conversion(module, why, _error(weights, pieces))
        whole = Int8Linear(torch.cat([piece.exact() for piece in pieces]), bias, dtype)
        why += "; PyTorch's int8 kernel has one scale for each output"
        return Conversion(HybridLinear(whole, copy, INT8_ROWS), why, _error(whole.dequantize(), pieces))

    def _bits(self, piece: Piece, is_head: bool) -> int:
        """4 for what is stored with 4 bits, 8 for what is stored with more; floats as asked."""
        if is_head or self._quantization == "int8" or piece.kind == "Q6_K":
            return 8
        return BITS[self._quantization] if piece.codes is None else piece.codes.bits

    def _reason(self, pieces: Sequence[Piece], bits: int, is_head: bool) -> str:
        kinds = " and ".join(dict.fromkeys(piece.kind for piece in pieces))
        if any(piece.codes is None for piece in pieces):
            why = f"stored as {kinds}, rounded to {bits} bits"
        else:
            why = f"stored as {kinds}, whose integers are kept"
        return why + ("; the output head is always of 8 bits" if is_head and self._quantization == "int4" else "")

    def _with_copy(self, module: PackedLinear, pieces: Sequence[Piece], dtype: torch.dtype) -> PackedLinear:
        if dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
            return module
        copy = torch.cat([piece.exact().to(dtype) for piece in pieces])
        return HybridLinear(module, copy, AMX_ROWS)


def _codes(pieces: Sequence[Piece], bits: int, step: torch.dtype, anchor: int) -> GroupCodes:
    """All pieces with the same number of bits: kept where they are stored so, widened, or rounded from floats."""
    codes = []
    for piece in pieces:
        if piece.codes is None:
            codes.append(round_to_groups(piece.read(), bits, step, anchor))
        else:
            codes.append(piece.codes if piece.codes.bits == bits else piece.codes.widen())
    return concatenate(codes)


def _fits_half(weights: GroupCodes) -> bool:
    limit = torch.finfo(torch.float16).max
    return bool(weights.scales.abs().amax() <= limit) and bool(weights.mins.abs().amax() <= limit)


def _error(held: GroupCodes | torch.Tensor, pieces: Sequence[Piece]) -> float:
    """Over some rows; exactly 0 for what is held as it is stored."""
    approximate, exact = [], []
    start = 0
    for piece in pieces:
        rows = len(piece.codes.codes) if piece.codes is not None else len(piece.read())
        every = max(1, rows * len(pieces) // _SAMPLED_ROWS)
        here = slice(start, start + rows, every)
        approximate.append(held[here] if isinstance(held, torch.Tensor) else held.rows(here).dequantize())
        whole = piece.codes.rows(slice(0, rows, every)).dequantize() if piece.codes is not None else piece.read()[::every]
        exact.append(whole)
        start += rows
    return relative_error(torch.cat(approximate), torch.cat(exact).float())
