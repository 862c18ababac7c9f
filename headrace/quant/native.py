"""Weights of 4 or 8 bits in groups of 32 for the native kernels: what GGUF stores, number for number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from headrace.kernels.native.library import DTYPES, NativeKernels
from headrace.quant.groups import GROUP, GroupCodes
from headrace.quant.packed import PackedLinear

_LANES = 16
"""Outputs that lie together."""


def misfit(in_features: int, out_features: int) -> str | None:
    """Why the kernel cannot hold a matrix; None: it can."""
    return f"{in_features} inputs are not a multiple of {GROUP}" if in_features % GROUP else None


def held(weights: GroupCodes) -> GroupCodes:
    """The weights as the kernel holds them: scales and minima in half precision, which is GGUF's own but for K blocks."""
    return dataclasses.replace(weights, scales=weights.scales.half().float(), mins=weights.mins.half().float())


class NativeLinear(PackedLinear):
    """``weight = scale * code + minimum``. Activations are rounded to 15 bits, with a scale for each row and group
    of 32.

    Where the CPU multiplies bfloat16, activations in it meet weights rounded to it once there are ``kernels.wide_rows``
    rows. On either side of that a row's result is the same, bit for bit, whatever rows are beside it.
    """

    packed: torch.Tensor

    def __init__(self, weights: GroupCodes, bias: torch.Tensor | None, kernels: NativeKernels) -> None:
        rows, columns = weights.shape
        super().__init__(columns, rows, None if bias is None else bias.float())
        self.bits = weights.bits
        self.format = f"{weights.bits} bits, groups of {GROUP}, native"
        self.register_buffer("packed", _pack(weights))
        self.groups = columns // GROUP
        self._matmul = kernels.matmul
        self.addresses = self._find()

    def _find(self) -> tuple[int, int | None]:
        """Of weights and bias, kept because asking a module for its tensors takes as long as a small product."""
        return self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> NativeLinear:
        raise TypeError("packed weights stay on the CPU and keep their format: pack them again")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``"""
        kind = DTYPES.get(x.dtype)
        if kind is None:
            return self.forward(x.float()).to(self.out_dtype or x.dtype)
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.in_features).contiguous()
        count, dtype = rows.shape[0], self.out_dtype or x.dtype
        y = torch.empty(count, self.out_features, dtype=dtype)
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
            self.out_features,
            self.groups,
            self.bits,
        )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def dequantize(self) -> torch.Tensor:
        blocks = self.packed.view(-1, self.groups, self.packed.shape[-1])
        tail = blocks[..., -4 * _LANES :].contiguous().view(torch.float16).float()
        scales, mins = tail.view(*tail.shape[:2], 2, _LANES).permute(2, 0, 3, 1).reshape(2, -1, self.groups)
        codes = blocks[..., : -4 * _LANES]
        if self.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=-1)
        codes = codes.reshape(*codes.shape[:2], 8, _LANES, 4).permute(0, 3, 1, 2, 4).reshape(-1, self.in_features)
        return GroupCodes(self.bits, codes, scales, mins).dequantize()[: self.out_features]


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
