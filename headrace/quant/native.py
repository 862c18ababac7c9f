"""Weights of 4 or 8 bits in groups of 32 for the native kernels: what checkpoints store, number for number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import nn

from headrace.kernels.linear.native import packed_linear
from headrace.kernels.native.library import DTYPES, NativeKernels
from headrace.layers.linear import Linear
from headrace.layers.stored import Codes, StoredMatrix
from headrace.quant.float_codes import TileCodes
from headrace.quant.groups import GROUP, GroupCodes, concatenate, round_to_groups, round_to_zero_points, rows_at_once
from headrace.quant.packed import PackedMethod, group_codes, integer_codes, kept_codes, rounding_error

LANES = 16
"""Outputs that lie together."""
_NAN = 127
"""Code of e4m3, without its sign."""


class Tail(IntEnum):
    """The form of a group's scales, as ``packed.h`` has it."""

    HALF_MINIMA = 0
    HALF_ZEROS = 1
    FLOAT_ZEROS = 2
    FLOAT_SCALES = 3
    """The codes are e4m3."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self in (Tail.HALF_MINIMA, Tail.HALF_ZEROS) else torch.float32

    @property
    def nbytes(self) -> int:
        return LANES * self.dtype.itemsize * (1 if self is Tail.FLOAT_SCALES else 2)


def tail_of(weights: GroupCodes) -> Tail:
    """Minima are kept in half precision, as in GGUF but for K blocks. Of codes with zero points nothing is lost."""
    if weights.zeros is None:
        return Tail.HALF_MINIMA
    return Tail.HALF_ZEROS if weights.scales.half().float().equal(weights.scales.float()) else Tail.FLOAT_ZEROS


def held(weights: GroupCodes) -> GroupCodes:
    """Returns the weights as the kernel stores them."""
    if tail_of(weights) is not Tail.HALF_MINIMA:
        return weights
    return dataclasses.replace(weights, scales=weights.scales.half().float(), offsets=weights.mins.half().float())


def with_vectors(kernels: NativeKernels | None) -> NativeKernels | None:
    """Returns the kernels if they use vector instructions: without those, PyTorch's are faster."""
    return None if kernels is None or kernels.tile == "portable" else kernels


class NativeMethod(PackedMethod):
    """``weight = scale * code + minimum``. Activations are rounded to 15 bits, with a scale for each row and group
    of 32.

    Where the CPU multiplies bfloat16, activations in it meet weights rounded to it once there are ``kernels.wide_rows``
    rows. On either side of that a row's result is the same, bit for bit, whatever rows are beside it.

    Buffers: ``packed``, as ``packed.h`` describes it, which must stay where it is: its address is kept; and ``order`` ``[K]``,
    where the checkpoint's groups are not of neighbours: the input that each place of the packed matrix has.
    """

    multiples = 1, GROUP
    constants = frozenset({"order"})

    def __init__(self, kernels: NativeKernels, bits: int) -> None:
        """``bits``: 4 or 8."""
        self.bits = bits
        self.format = f"{bits} bits, groups of {GROUP}, native"
        self._matmul = kernels.matmul
        self._tail = Tail.HALF_MINIMA
        self.groups = 0
        """Groups of inputs."""
        self.addresses: tuple[int, int | None] = (0, None)
        """Addresses of weights and bias, cached because module attribute access takes as long as a small product."""
        self.order: torch.Tensor | None = None

    @property
    def code(self) -> int:
        """The number format, as the kernels take it."""
        return self.bits | self._tail << 8

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        """Raises OverflowError if a scale is NaN or beyond the range of its precision; the layer is then as it was."""
        kept = keep(parts, self.bits)
        self.order, weights = (None, group_codes(parts, self.bits, torch.float16, anchor=0)) if kept is None else kept
        self._tail = tail_of(weights)
        limit = torch.finfo(self._tail.dtype).max
        if not all(float(values.abs().amax()) <= limit for values in (weights.scales, weights.mins)):
            raise OverflowError(f"a scale is beyond {limit:g}, or no number")
        # Some blocks of rows at a time: each step of packing is a copy. No name holds the blocks, so that their memory is free
        # when the error is measured.
        size = rows_at_once(layer.in_features, LANES)
        starts = range(0, layer.out_features, size)
        self._register(layer, torch.cat([pack(weights.rows(slice(at, at + size)), self._tail) for at in starts]))
        here = held(weights)
        exact = kept is not None and here.scales.equal(weights.scales) and here.mins.equal(weights.mins)
        return 0.0 if exact else rounding_error(lambda rows: here.rows(rows).dequantize(), parts)

    def rewrite(self, layer: Linear, parts: Sequence[StoredMatrix]) -> None:
        """Rounds floats to the form of scales that the layer has, in its order of inputs: calls of the kernels keep both."""
        floats = torch.cat([part.exact() for part in parts])
        floats = floats if self.order is None else floats[:, self.order]
        packed, size = layer.get_buffer("packed"), rows_at_once(layer.in_features, LANES)
        for start in range(0, layer.out_features, size):
            rows = self._pack_floats(floats[start : start + size])
            packed[start // LANES : start // LANES + len(rows)].copy_(rows)

    def _pack_floats(self, floats: torch.Tensor) -> torch.Tensor:
        if self._tail is Tail.HALF_MINIMA:
            weights = round_to_groups(floats, self.bits, torch.float16)
        else:
            weights = round_to_zero_points(floats, self.bits, self._tail.dtype)
        limit = torch.finfo(self._tail.dtype).max
        if not all(float(values.abs().amax()) <= limit for values in (weights.scales, weights.mins)):
            raise OverflowError(f"a scale is beyond {limit:g}, or no number")
        return pack(weights, self._tail)

    def _register(self, layer: Linear, packed: torch.Tensor) -> None:
        layer.register_buffer("packed", packed)
        if self.order is not None:
            layer.register_buffer("order", self.order)
        if layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.data.float(), requires_grad=False)
        self.groups = layer.in_features // GROUP
        self.addresses = packed.data_ptr(), None if layer.bias is None else layer.bias.data_ptr()

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in DTYPES:
            return self.apply(layer, x.float()).to(layer.out_dtype or x.dtype)
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, layer.in_features).contiguous()
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        dtype = layer.out_dtype or x.dtype
        y = packed_linear(self._matmul, rows, *self.addresses, layer.out_features, self.groups, self.code, dtype)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], layer.out_features)

    def dequantize(self, layer: Linear) -> torch.Tensor:
        weight = unpack(layer.get_buffer("packed"), self.bits, self._tail)[: layer.out_features]
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)


class NativeFp8Method(NativeMethod):
    """``weight = scale * code`` with codes of e4m3. Products are those of floats: activations are not rounded."""

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__(kernels, 8)
        self.format = f"e4m3, a scale for each {GROUP} inputs, native"
        self._tail = Tail.FLOAT_SCALES

    @classmethod
    def holds(cls, codes: Codes) -> bool:
        if not isinstance(codes, TileCodes) or codes.values.dim() != 2:
            return False
        return codes.scales.shape[1] == 1 or not (codes.tile[1] % GROUP or codes.first[1] % GROUP)

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        """Raises OverflowError if a code is NaN; the layer is then as it was."""
        self._register(layer, pack_fp8([part.codes for part in parts if isinstance(part.codes, TileCodes)]))
        return 0.0

    def _pack_floats(self, floats: torch.Tensor) -> torch.Tensor:
        groups = floats.float().view(len(floats), -1, GROUP)
        scales = (groups.abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (groups / scales[..., None]).view(floats.shape).to(torch.float8_e4m3fn)
        return pack_fp8([TileCodes(codes, scales, (1, GROUP))])


def keep(parts: Sequence[StoredMatrix], bits: int) -> tuple[torch.Tensor | None, GroupCodes] | None:
    """Keeps the integers of all parts, in groups of 32.

    Returns:
        The input at each place of the result, None: they are in order; and one matrix of all parts. None: no such groups hold
        them, or the inputs of the parts are in several orders.
    """
    codes = [integer_codes(part.codes) for part in parts]
    if all(one is None or one.order is None for one in codes):
        pieces = [kept_codes(part, bits) for part in parts]
        whole = [piece for piece in pieces if piece is not None]
        return (None, concatenate(whole)) if len(whole) == len(parts) else None
    ordered = [one.sort() for one in codes if one is not None and one.bits <= bits]
    sorts = [one for one in ordered if one is not None]
    if len(sorts) < len(parts) or any(not torch.equal(sorts[0][0], order) for order, _ in sorts):
        return None
    regrouped = [piece.widen().regroup() if bits == 8 else piece.regroup() for _, piece in sorts]
    whole = [piece for piece in regrouped if piece is not None]
    return (sorts[0][0], concatenate(whole)) if len(whole) == len(parts) else None


def _lanes(values: torch.Tensor) -> torch.Tensor:
    """``[N, ...] -> [N / 16, 16, ...]``; N is filled up with zeros."""
    rows = len(values)
    blocks = -(-rows // LANES)
    fill = torch.zeros(blocks * LANES - rows, *values.shape[1:], dtype=values.dtype)
    return torch.cat((values, fill)).view(blocks, LANES, *values.shape[1:])


def pack(weights: GroupCodes, tail: Tail) -> torch.Tensor:
    """``[N / 16, K / 32, bytes of a group]`` uint8, as ``packed.h`` describes it; N is filled up with zeros."""
    rows, groups = weights.scales.shape
    codes = _lanes(weights.codes.view(rows, groups, 8, 4)).permute(0, 2, 3, 1, 4)
    if weights.bits == 4:
        codes = codes[:, :, :4] | (codes[:, :, 4:] << 4)
    offsets = weights.mins if tail is Tail.HALF_MINIMA else weights.offsets.float()
    values = torch.stack((_lanes(weights.scales), _lanes(offsets)), dim=1).permute(0, 3, 1, 2).to(tail.dtype)
    return _with_tail(codes, values)


def pack_fp8(parts: Sequence[TileCodes]) -> torch.Tensor:
    """``[N / 16, K / 32, bytes of a group]`` uint8, as ``matmul_e4m3.cpp`` describes it; N is filled up with zeros. Raises
    OverflowError if a code is NaN."""
    codes = torch.cat([part.values.view(torch.uint8) for part in parts])
    if bool(((codes & _NAN) == _NAN).any()):
        raise OverflowError("a code is no number")
    groups = codes.shape[1] // GROUP
    scales = torch.cat([part.scales_of(1, GROUP) for part in parts])
    return _with_tail(_lanes(codes.view(-1, groups, GROUP)).permute(0, 2, 3, 1), _lanes(scales).permute(0, 2, 1))


def _with_tail(codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Bytes of codes and floats, both ``[blocks, groups, ...]``, one behind the other."""
    blocks, groups = codes.shape[:2]
    tail = values.contiguous().view(torch.uint8).reshape(blocks, groups, -1)
    return torch.cat((codes.reshape(blocks, groups, -1), tail), dim=-1)


def unpack(packed: torch.Tensor, bits: int, tail: Tail) -> torch.Tensor:
    """Returns the weights that the kernels multiply by, ``[16 * N, K]`` float32 of N blocks."""
    blocks, groups, _ = packed.shape
    codes, end = packed[..., : -tail.nbytes], packed[..., -tail.nbytes :].contiguous().view(tail.dtype).float()
    values = end.view(blocks, groups, -1, LANES).permute(2, 0, 3, 1).reshape(-1, blocks * LANES, groups)
    if tail is Tail.FLOAT_SCALES:
        rows = codes.view(blocks, groups, GROUP, LANES).permute(0, 3, 1, 2).contiguous().view(torch.float8_e4m3fn).float()
        return rows.reshape(blocks * LANES, -1) * values[0].repeat_interleave(GROUP, 1)
    if bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    codes = codes.reshape(blocks, groups, 8, LANES, 4).permute(0, 3, 1, 2, 4).reshape(blocks * LANES, -1)
    offsets = values[1] if tail is Tail.HALF_MINIMA else values[1].to(torch.uint8)
    return GroupCodes(bits, codes, values[0], offsets).dequantize()
