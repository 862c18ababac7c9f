"""GGUF's blocks as GroupCodes, number for number, for the block types that are groups of 32 codes.

The layouts are those of ggml's ``block_q*`` structures. ``gguf.quants`` knows only the way to floats.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from headrace.quant.groups import GROUP, GroupCodes

Bytes = npt.NDArray[np.uint8]
Decoded = tuple[int, Bytes, npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""bits, codes [blocks, block size], scales [blocks, block size / 32] and mins, alike."""


def decode(blocks: Bytes, kind: GGMLQuantizationType) -> GroupCodes | None:
    """Decodes a file's matrix to codes, scales and minima; None if its type has another form.

    Args:
        blocks: ``[N, bytes of a row]``
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        return None
    rows = blocks.shape[0]
    size = GGML_QUANT_SIZES[kind][1]
    bits, codes, scales, mins = decoder(np.ascontiguousarray(blocks).reshape(-1, size))
    return GroupCodes(
        bits,
        torch.from_numpy(np.ascontiguousarray(codes).reshape(rows, -1)),
        torch.from_numpy(np.ascontiguousarray(scales).reshape(rows, -1)),
        torch.from_numpy(np.ascontiguousarray(mins).reshape(rows, -1)),
    )


def _half(data: Bytes) -> npt.NDArray[np.float32]:
    """``[blocks, 2 n]`` bytes -> ``[blocks, n]`` float32"""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """``[..., 16]`` -> ``[..., 32]``: the low nibbles, then the high ones."""
    return np.concatenate((data & np.uint8(15), data >> np.uint8(4)), axis=-1)


def _bits(data: Bytes) -> Bytes:
    """``[blocks, 4]`` -> ``[blocks, 32]``: one bit each, from the lowest."""
    return np.unpackbits(data, axis=-1, bitorder="little")


def _q4_0(blocks: Bytes) -> Decoded:
    d = _half(blocks[:, :2])
    return 4, _nibbles(blocks[:, 2:]), d, -8 * d


def _q4_1(blocks: Bytes) -> Decoded:
    return 4, _nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Decoded:
    d = _half(blocks[:, :2])
    return 8, _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << np.uint8(4)), d, -16 * d


def _q5_1(blocks: Bytes) -> Decoded:
    codes = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << np.uint8(4))
    return 8, codes, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Decoded:
    d = _half(blocks[:, :2])
    return 8, blocks[:, 2:] ^ np.uint8(128), d, -128 * d


def _q4_k(blocks: Bytes) -> Decoded:
    scales, mins = _k_scales(blocks)
    # A run of 32 bytes holds two groups: one in the low nibbles, the next in the high ones.
    codes = _nibbles(blocks[:, 16:].reshape(len(blocks), 4, GROUP))
    return 4, codes, scales, mins


def _q5_k(blocks: Bytes) -> Decoded:
    scales, mins = _k_scales(blocks)
    low = _nibbles(blocks[:, 48:].reshape(len(blocks), 4, GROUP)).reshape(len(blocks), 8, GROUP)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> shifts) & np.uint8(1)
    return 8, low | (high << np.uint8(4)), scales, mins


def _k_scales(blocks: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales and minima of the eight groups of a K block: 6-bit numbers in 12 bytes, times two half floats."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    high = np.uint8(0x30)
    scales = np.concatenate((first & 63, (rest & 15) | ((first >> 2) & high)), axis=1).astype(np.float32)
    mins = np.concatenate((second & 63, (rest >> 4) | ((second >> 2) & high)), axis=1).astype(np.float32)
    return _half(blocks[:, :2]) * scales, -_half(blocks[:, 2:4]) * mins


_DECODERS: dict[GGMLQuantizationType, Callable[[Bytes], Decoded]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
}
