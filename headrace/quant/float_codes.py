"""Matrices of small floats with a scale for each block of them, as checkpoints store them.

MXFP4 (Open Compute Project, "Microscaling Formats", 2023): blocks of 32 numbers of 4 bits, e2m1, with a power of two; two
numbers a byte, the lower half first. NVFP4: blocks of 16 with a scale of e4m3. FP8: numbers of e4m3 with a float for each
tile, as DeepSeek-V3 (2024) has it, for each output or for the matrix.
"""

from __future__ import annotations

import dataclasses

import torch

from headrace.errors import ConfigError
from headrace.parallel.shards import Cut
from headrace.quant.groups import GroupCodes, rows_at_once

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
_E8M0_NAN = 255
_E2M1_ZERO = 128
"""Code of 0 among the numbers of e2m1 in halves: the middle one, which kernels subtract."""


@dataclasses.dataclass(frozen=True)
class TileCodes:
    """``weight[n, k] = values[n, k] * scales[(n + first[0]) // tile[0], (k + first[1]) // tile[1]]``

    One scale for the matrix is a tile ``(N, K)``, one for each output a tile ``(1, K)``. Stacked matrices have tiles of their
    own.
    """

    values: torch.Tensor
    """``[..., N, K]`` float8_e4m3fn"""
    scales: torch.Tensor
    """``[..., ceil((N + first[0]) / tile[0]), ceil((K + first[1]) / tile[1])]``"""
    tile: tuple[int, int]
    first: tuple[int, int] = (0, 0)
    """Offset of the matrix in its first tile, since a cut may split tiles."""

    def dequantize(self) -> torch.Tensor:
        """``[..., N, K]`` float32"""
        weight = self.values.float()
        if not weight.numel():
            return weight
        scales = self.scales.float()
        high, shift = self.tile[0], self.first[0]
        # Some rows of tiles at a time: scales for each number are as large as the weight.
        count = max(1, rows_at_once(weight.shape[-1]) // high)
        for row in range(0, scales.shape[-2], count):
            start, stop = max(row * high - shift, 0), min((row + count) * high - shift, weight.shape[-2])
            here = scales[..., row : row + count, :]
            if scales.shape[-1] > 1:
                here = here.repeat_interleave(self.tile[1], -1).narrow(-1, self.first[1], weight.shape[-1])
            if high > 1:
                here = here.repeat_interleave(high, -2).narrow(-2, start + shift - row * high, stop - start)
            weight[..., start:stop, :] *= here
        return weight

    def scales_of(self, outputs: int, inputs: int) -> torch.Tensor:
        """The scales of blocks of which none has numbers of several tiles, ``[..., ceil(N / outputs), ceil(K / inputs)]``
        float32."""
        places = [
            (torch.arange(0, size, step, device=self.scales.device) + first) // tile
            for size, step, first, tile in zip(self.values.shape[-2:], (outputs, inputs), self.first, self.tile, strict=True)
        ]
        return self.scales.float().index_select(-2, places[0]).index_select(-1, places[1])

    def cut(self, cut: Cut) -> TileCodes:
        axis = 0 if cut.along == "outputs" else 1
        tile, start = self.tile[axis], self.first[axis] + cut.start
        tiles = -(-(self.first[axis] + cut.stop) // tile) - start // tile
        first = (start % tile, self.first[1]) if axis == 0 else (self.first[0], start % tile)
        values = self.values.narrow(axis - 2, cut.start, cut.stop - cut.start)
        return TileCodes(values, self.scales.narrow(axis - 2, start // tile, tiles), self.tile, first)


@dataclasses.dataclass(frozen=True)
class MicroscaledCodes:
    """Blocks of 4-bit floats along the inputs: MXFP4 with an exponent for each, NVFP4 with a scale."""

    blocks: torch.Tensor
    """``[..., N, K / block, block / 2]`` uint8, two numbers a byte, the lower half first. MXFP4 has blocks of 32, NVFP4 of
    16."""
    scales: torch.Tensor
    """``[..., N, K / block]``: uint8 exponents of two, 127 for 1; or float32 scales, which have the matrix's own within."""

    def dequantize(self) -> torch.Tensor:
        """``[..., N, K]``, exactly: bfloat16 for MXFP4, float32 for NVFP4."""
        blocks, scales = self.blocks, self.scales
        pairs = _pairs(blocks.device)
        width = 2 * blocks.shape[-1] * blocks.shape[-2]
        dtype = torch.float32 if scales.is_floating_point() else torch.bfloat16
        out = torch.empty(*scales.shape[:-1], width, dtype=dtype, device=blocks.device)
        rows, codes = out.view(-1, width), blocks.reshape(-1, *blocks.shape[-2:])
        flat = scales.reshape(-1, scales.shape[-1])
        # A few rows at a time: what lies between bytes and numbers is several times as large as both.
        size = rows_at_once(width)
        for start in range(0, len(rows), size):
            here = slice(start, start + size)
            numbers = pairs.index_select(0, codes[here].flatten().int()).view(*codes[here].shape[:2], -1)
            factors = flat[here]
            if not scales.is_floating_point():
                factors = torch.ldexp(torch.ones_like(factors, dtype=torch.float32), factors.int() - _E8M0_BIAS)
            rows[here] = (numbers.to(dtype) * factors.to(dtype).unsqueeze(-1)).flatten(1)
        return out

    def integers(self) -> GroupCodes | None:
        """The same numbers as 8-bit codes with zero points; None: it is no matrix, or has a scale that is NaN."""
        scales = self.scales
        if scales.dim() != 2:
            return None
        if scales.is_floating_point():
            halves = scales.float() / 2
        elif bool((scales == _E8M0_NAN).any()):
            return None
        else:
            halves = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - (_E8M0_BIAS + 1))
        numbers = (2 * _pairs(self.blocks.device).float() + _E2M1_ZERO).to(torch.uint8)
        size = rows_at_once(2 * self.blocks[0].numel())
        # A few rows at a time: an index takes four bytes.
        rows = [numbers.index_select(0, rows.flatten().int()).view(len(rows), -1) for rows in torch.split(self.blocks, size)]
        codes = torch.cat(rows)
        zeros = torch.full_like(halves, _E2M1_ZERO, dtype=torch.uint8)
        return GroupCodes(8, codes, halves, zeros, 2 * self.blocks.shape[-1])

    def cut(self, cut: Cut) -> MicroscaledCodes:
        size = 2 * self.blocks.shape[-1]
        if cut.along == "outputs":
            here = slice(cut.start, cut.stop)
            return MicroscaledCodes(self.blocks[..., here, :, :], self.scales[..., here, :])
        if cut.start % size or cut.stop % size:
            raise ConfigError(
                f"inputs {cut.start} to {cut.stop} split a block of {size} that share a scale", "tensor_parallel_size"
            )
        here = slice(cut.start // size, cut.stop // size)
        return MicroscaledCodes(self.blocks[..., here, :], self.scales[..., here])


def _pairs(device: torch.device) -> torch.Tensor:
    """``[256, 2]``: the two numbers of every byte."""
    values = torch.tensor((*_E2M1, *(-value for value in _E2M1)), dtype=torch.bfloat16, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
