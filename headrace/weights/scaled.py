"""Checkpoints whose matrices are small floats with a scale for each block of them, read as the floats that they mean.

MXFP4 (Open Compute Project, "Microscaling Formats", 2023): blocks of 32 numbers of 4 bits, e2m1, with a power of two; two
numbers a byte, the lower half first. FP8: numbers of e4m3 with a float for each tile, as DeepSeek-V3 (2024) has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from headrace.errors import ConfigError
from headrace.quant.groups import GroupCodes
from headrace.weights.checkpoint import StoredTensor
from headrace.weights.safetensors import SafetensorsCheckpoint

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
_ROWS = 4096
_BLOCKS, _SCALES = "_blocks", "_scales"
_TILE_SCALE = "_scale_inv"


class ScaledCheckpoint:
    """A checkpoint in which ``NAME_blocks`` and ``NAME_scales`` are one tensor NAME_blocks of floats, and ``NAME`` and
    ``NAME_scale_inv`` one tensor NAME.

    Args:
        tile: outputs and inputs that share a scale of FP8; None: there are none such.
        device: where the floats are made, and stay.

    Raises:
        ConfigError: a scale is missing, or does not fit its matrix.
    """

    def __init__(
        self, inner: SafetensorsCheckpoint, tile: tuple[int, int] | None = None, device: str | torch.device = "cpu"
    ) -> None:
        self._inner = inner
        self._device = device
        self._tile = tile
        self._scale_of: dict[str, str] = {}
        stored: dict[str, StoredTensor] = {}
        for name, tensor in inner.tensors.items():
            if name.endswith(_BLOCKS) and tensor.kind == "U8":
                scale = self._find(name, name.removesuffix(_BLOCKS) + _SCALES, (*tensor.shape[:-1],))
                shape = (*tensor.shape[:-2], tensor.shape[-2] * tensor.shape[-1] * 2)
                kind = "MXFP4"
            elif name + _TILE_SCALE in inner.tensors:
                scale, shape, kind = self._find(name, name + _TILE_SCALE, self._tiles(name, tensor)), tensor.shape, tensor.kind
            else:
                stored[name] = tensor
                continue
            nbytes = tensor.nbytes + inner.tensors[scale].nbytes
            stored[name] = dataclasses.replace(tensor, shape=shape, kind=kind, nbytes=nbytes)
        scales = set(self._scale_of.values())
        self.tensors: Mapping[str, StoredTensor] = {name: tensor for name, tensor in stored.items() if name not in scales}

    def _tiles(self, name: str, tensor: StoredTensor) -> tuple[int, ...]:
        """Tiles of a matrix, each way."""
        if self._tile is None:
            raise ConfigError(f"{name} has scales, but quantization_config gives no weight_block_size", "quantization_config")
        return tuple(-(-size // tile) for size, tile in zip(tensor.shape, self._tile, strict=True))

    def _find(self, name: str, scale: str, shape: tuple[int, ...]) -> str:
        found = self._inner.tensors.get(scale)
        if found is None or found.shape != shape:
            got = "missing" if found is None else f"of the shape {list(found.shape)}, not {list(shape)}"
            raise ConfigError(f"{scale}, the scales of {name}, is {got}", "model")
        self._scale_of[name] = scale
        return scale

    def read(self, name: str) -> torch.Tensor:
        scale = self._scale_of.get(name)
        if scale is None:
            return self._inner.read(name)
        if self.tensors[name].kind == "MXFP4":
            return from_mxfp4(self._inner.raw(name).to(self._device), self._inner.raw(scale).to(self._device))
        if self._tile is None:
            raise ValueError(f"{name} has scales of tiles whose size is not known")
        return from_tiles(self._inner.read(name).to(self._device), self._inner.read(scale).to(self._device), self._tile)

    def codes(self, name: str) -> GroupCodes | None:
        return None

    def close(self) -> None:
        self._inner.close()


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers, exactly.

    Args:
        blocks: ``[..., groups, bytes]`` uint8, two numbers a byte, the lower half first.
        scales: ``[..., groups]`` uint8: exponents of two, 127 for 1.

    Returns:
        ``[..., groups * bytes * 2]`` bfloat16.
    """
    pairs = _pairs(blocks.device)
    out = torch.empty(*scales.shape[:-1], 2 * blocks.shape[-1] * blocks.shape[-2], dtype=torch.bfloat16, device=blocks.device)
    rows, codes = out.view(-1, out.shape[-1]), blocks.reshape(-1, *blocks.shape[-2:])
    exponents = scales.reshape(-1, scales.shape[-1]).int() - _E8M0_BIAS
    # A few rows at a time: what lies between bytes and numbers is several times as large as both.
    for start in range(0, len(rows), _ROWS):
        here = slice(start, start + _ROWS)
        numbers = pairs.index_select(0, codes[here].flatten().int()).view(*codes[here].shape[:2], -1)
        factors = torch.ldexp(torch.ones_like(exponents[here], dtype=torch.float32), exponents[here])
        rows[here] = (numbers * factors.to(torch.bfloat16).unsqueeze(-1)).flatten(1)
    return out


def _pairs(device: torch.device) -> torch.Tensor:
    """``[256, 2]``: the two numbers of every byte."""
    values = torch.tensor((*_E2M1, *(-value for value in _E2M1)), dtype=torch.bfloat16, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1)


def from_tiles(matrix: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """``[outputs, inputs]`` float32: each tile times its scale.

    Args:
        scales: ``[ceil(outputs / tile[0]), ceil(inputs / tile[1])]``
    """
    wide = scales.float().repeat_interleave(tile[0], 0)[: matrix.shape[0]].repeat_interleave(tile[1], 1)[:, : matrix.shape[1]]
    return matrix.float() * wide
