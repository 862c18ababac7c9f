"""Checkpoints whose matrices are small floats with scales in tensors of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from headrace.errors import ConfigError
from headrace.quant.float_codes import MicroscaledCodes, TileCodes
from headrace.weights.checkpoint import Checkpoint, StoredTensor
from headrace.weights.names import Slice
from headrace.weights.safetensors import SafetensorsCheckpoint

_BLOCKS, _SCALES = "_blocks", "_scales"
_TILE_SCALE = "_scale_inv"


class ScaledCheckpoint(Checkpoint):
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
        self._scale_of: dict[str, str] = {}
        self._tiles: dict[str, tuple[int, ...]] = {}
        """How many numbers along each axis of a tensor share a scale."""
        stored: dict[str, StoredTensor] = {}
        for name, tensor in inner.tensors.items():
            shape, kind = tensor.shape, tensor.kind
            if name.endswith(_BLOCKS) and kind == "U8":
                block = 2 * shape[-1]
                self._tiles[name] = (*(1 for _ in shape[:-2]), block)
                scale = self._find(name, name.removesuffix(_BLOCKS) + _SCALES, shape[:-1])
                shape, kind = (*shape[:-2], shape[-2] * block), "MXFP4"
            elif name + _TILE_SCALE in inner.tensors:
                if tile is None:
                    raise ConfigError(
                        f"{name} has scales, but quantization_config gives no weight_block_size", "quantization_config"
                    )
                self._tiles[name] = tile
                tiles = tuple(-(-size // side) for size, side in zip(shape, tile, strict=True))
                scale = self._find(name, name + _TILE_SCALE, tiles)
            else:
                stored[name] = tensor
                continue
            nbytes = tensor.nbytes + inner.tensors[scale].nbytes
            stored[name] = dataclasses.replace(tensor, shape=shape, kind=kind, nbytes=nbytes)
        scales = set(self._scale_of.values())
        self.tensors: Mapping[str, StoredTensor] = {name: tensor for name, tensor in stored.items() if name not in scales}

    def _find(self, name: str, scale: str, shape: tuple[int, ...]) -> str:
        found = self._inner.tensors.get(scale)
        if found is None or found.shape != shape:
            got = "missing" if found is None else f"of the shape {list(found.shape)}, not {list(shape)}"
            raise ConfigError(f"{scale}, the scales of {name}, is {got}", "model")
        self._scale_of[name] = scale
        return scale

    def read(self, name: str, where: Slice | None = None) -> torch.Tensor:
        if name not in self._scale_of:
            return self._inner.read(name, where)
        if where is None:
            return self._codes(name, None).dequantize()
        parts = [self._read_range(name, where.axis, *range_) for range_ in where.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=where.axis)

    def codes(self, name: str) -> TileCodes | MicroscaledCodes | None:
        return self._codes(name, None) if name in self._scale_of else None

    def _read_range(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        """Reads the range with the whole of those numbers at its ends that share a scale."""
        size = self._tiles[name][axis]
        first, last = start // size * size, min(-(-stop // size) * size, self.tensors[name].shape[axis])
        return self._codes(name, (axis, first, last)).dequantize().narrow(axis, start - first, stop - start)

    def _codes(self, name: str, where: tuple[int, int, int] | None) -> TileCodes | MicroscaledCodes:
        """Codes of the whole, or of a range (axis, start, stop) that splits no numbers with a common scale."""
        values = scales = None
        if where is not None:
            axis, start, stop = where
            size = self._tiles[name][axis]
            scales = Slice(axis, ((start // size, -(-stop // size)),))
            # Numbers of MXFP4 lie in blocks, along an axis of their own.
            values = scales if self.tensors[name].kind == "MXFP4" else Slice(axis, ((start, stop),))
        scale = self._inner.raw(self._scale_of[name], scales).to(self._device)
        if self.tensors[name].kind == "MXFP4":
            return MicroscaledCodes(self._inner.raw(name, values).to(self._device), scale)
        outputs, inputs = self._tiles[name]
        return TileCodes(self._inner.read(name, values).to(self._device), scale, (outputs, inputs))

    def close(self) -> None:
        self._inner.close()
