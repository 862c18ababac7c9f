"""Weights of 4 or 8 bits in groups of 32 for the native kernels: what GGUF stores, number for number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from headrace.kernels.native.library import DTYPES, NativeKernels
from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.quant.groups import GROUP, GroupCodes, rows_at_once
from headrace.quant.packed import PackedMethod, group_codes, kept_codes, rounding_error

_LANES = 16
"""Outputs that lie together."""


def held(weights: GroupCodes) -> GroupCodes:
    """Returns the weights as the kernel stores them: scales and minima in half precision, GGUF's own except in K blocks."""
    return dataclasses.replace(weights, scales=weights.scales.half().float(), offsets=weights.mins.half().float())


class NativeMethod(PackedMethod):
    """``weight = scale * code + minimum``. Activations are rounded to 15 bits, with a scale for each row and group
    of 32.

    Where the CPU multiplies bfloat16, activations in it meet weights rounded to it once there are ``kernels.wide_rows``
    rows. On either side of that a row's result is the same, bit for bit, whatever rows are beside it.

    Buffer: ``packed``, as ``matmul.cpp`` describes it. It must stay where it is: its address is kept.
    """

    multiples = 1, GROUP

    def __init__(self, kernels: NativeKernels, bits: int) -> None:
        """``bits``: 4 or 8."""
        self.bits = bits
        self.format = f"{bits} bits, groups of {GROUP}, native"
        self._matmul = kernels.matmul
        self.groups = 0
        """Groups of inputs."""
        self.addresses: tuple[int, int | None] = (0, None)
        """Addresses of weights and bias, cached because module attribute access takes as long as a small product."""

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        """Raises OverflowError if a scale is NaN or beyond the range of half precision; the layer is then as it was."""
        weights = group_codes(parts, self.bits, torch.float16, anchor=0)
        limit = torch.finfo(torch.float16).max
        if not all(float(values.abs().amax()) <= limit for values in (weights.scales, weights.mins)):
            raise OverflowError(f"a scale is beyond {limit:g}, or no number")
        # Some blocks of rows at a time: each step of packing is a copy.
        size = rows_at_once(layer.in_features, _LANES)
        packed = [_pack(weights.rows(slice(at, at + size))) for at in range(0, layer.out_features, size)]
        layer.register_buffer("packed", torch.cat(packed))
        if layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.data.float(), requires_grad=False)
        self.groups = layer.in_features // GROUP
        self.addresses = layer.get_buffer("packed").data_ptr(), None if layer.bias is None else layer.bias.data_ptr()
        kept = held(weights)
        stored = all(kept_codes(part, self.bits) is not None for part in parts)
        exact = stored and kept.scales.equal(weights.scales) and kept.mins.equal(weights.mins)
        return 0.0 if exact else rounding_error(lambda here: kept.rows(here).dequantize(), parts)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        kind = DTYPES.get(x.dtype)
        if kind is None:
            return self.apply(layer, x.float()).to(layer.out_dtype or x.dtype)
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, layer.in_features).contiguous()
        count, dtype = rows.shape[0], layer.out_dtype or x.dtype
        y = torch.empty(count, layer.out_features, dtype=dtype)
        packed, bias = self.addresses
        self._matmul(
            rows.data_ptr(),
            kind,
            rows.stride(0),
            packed,
            bias,
            y.data_ptr(),
            DTYPES[dtype],
            count,
            layer.out_features,
            self.groups,
            self.bits,
        )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], layer.out_features)

    def dequantize(self, layer: Linear) -> torch.Tensor:
        packed = layer.get_buffer("packed")
        blocks = packed.view(-1, self.groups, packed.shape[-1])
        tail = blocks[..., -4 * _LANES :].contiguous().view(torch.float16).float()
        scales, mins = tail.view(*tail.shape[:2], 2, _LANES).permute(2, 0, 3, 1).reshape(2, -1, self.groups)
        codes = blocks[..., : -4 * _LANES]
        if self.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=-1)
        codes = codes.reshape(*codes.shape[:2], 8, _LANES, 4).permute(0, 3, 1, 2, 4).reshape(-1, layer.in_features)
        return GroupCodes(self.bits, codes, scales, mins).dequantize()[: layer.out_features]


def _pack(weights: GroupCodes) -> torch.Tensor:
    """``[N / 16, K / 32, bytes of a group]`` uint8, as ``matmul.cpp`` describes it; N is filled up with zeros."""
    rows, groups = weights.scales.shape
    blocks = -(-rows // _LANES)

    def lanes(values: torch.Tensor) -> torch.Tensor:
        fill = torch.zeros(blocks * _LANES - rows, *values.shape[1:], dtype=values.dtype)
        return torch.cat((values, fill)).view(blocks, _LANES, groups, *values.shape[2:])

    codes = lanes(weights.codes.view(rows, groups, 8, 4)).permute(0, 2, 3, 1, 4)
    if weights.bits == 4:
        codes = codes[:, :, :4] | (codes[:, :, 4:] << 4)
    tail = torch.stack((lanes(weights.scales), lanes(weights.mins)), dim=1).permute(0, 3, 1, 2).half()
    tail = tail.contiguous().view(torch.uint8).view(blocks, groups, 4 * _LANES)
    return torch.cat((codes.reshape(blocks, groups, -1), tail), dim=-1)
