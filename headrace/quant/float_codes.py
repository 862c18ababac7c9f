"""Matrices of small floats with a scale for each block of them, as checkpoints store them.

MXFP4 (Open Compute Project, "Microscaling Formats", 2023): blocks of 32 numbers of 4 bits, e2m1, with a power of two; two
numbers a byte, the lower half first. FP8: numbers of e4m3 with a float for each tile, as DeepSeek-V3 (2024) has it.
"""

from __future__ import annotations

import dataclasses

import torch

from headrace.errors import ConfigError
from headrace.parallel.shards import Cut

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class TileCodes:
    """``weight[n, k] = values[n, k] * scales[(n + first[0]) // tile[0], (k + first[1]) // tile[1]]``"""

    values: torch.Tensor
    """``[N, K]`` float8_e4m3fn"""
    scales: torch.Tensor
    """``[ceil((N + first[0]) / tile[0]), ceil((K + first[1]) / tile[1])]``"""
    tile: tuple[int, int]
    first: tuple[int, int] = (0, 0)
    """Offset of the matrix in its first tile, since a cut may split tiles."""

    def dequantize(self) -> torch.Tensor:
        """``[N, K]`` float32"""
        wide = self.scales.float()
        for axis in (0, 1):
            wide = wide.repeat_interleave(self.tile[axis], axis).narrow(axis, self.first[axis], self.values.shape[axis])
        return self.values.float() * wide

    def cut(self, cut: Cut) -> TileCodes:
        axis = 0 if cut.along == "outputs" else 1
        tile, start = self.tile[axis], self.first[axis] + cut.start
        tiles = -(-(self.first[axis] + cut.stop) // tile) - start // tile
        first = (start % tile, self.first[1]) if axis == 0 else (self.first[0], start % tile)
        return TileCodes(cut.of(self.values), self.scales.narrow(axis, start // tile, tiles), self.tile, first)


@dataclasses.dataclass(frozen=True)
class MicroscaledCodes:
    """MXFP4: blocks of 4-bit floats along the inputs, each with an exponent."""

    blocks: torch.Tensor
    """``[..., N, K / 32, 16]`` uint8, two numbers a byte, the lower half first."""
    scales: torch.Tensor
    """``[..., N, K / 32]`` uint8: exponents of two, 127 for 1."""

    def dequantize(self) -> torch.Tensor:
        """``[..., N, K]`` bfloat16, exactly."""
        blocks, scales = self.blocks, self.scales
        pairs = _pairs(blocks.device)
        width = 2 * blocks.shape[-1] * blocks.shape[-2]
        out = torch.empty(*scales.shape[:-1], width, dtype=torch.bfloat16, device=blocks.device)
        rows, codes = out.view(-1, width), blocks.reshape(-1, *blocks.shape[-2:])
        exponents = scales.reshape(-1, scales.shape[-1]).int() - _E8M0_BIAS
        # A few rows at a time: what lies between bytes and numbers is several times as large as both.
        for start in range(0, len(rows), _ROWS):
            here = slice(start, start + _ROWS)
            numbers = pairs.index_select(0, codes[here].flatten().int()).view(*codes[here].shape[:2], -1)
            factors = torch.ldexp(torch.ones_like(exponents[here], dtype=torch.float32), exponents[here])
            rows[here] = (numbers * factors.to(torch.bfloat16).unsqueeze(-1)).flatten(1)
        return out

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
