"""GGUF's blocks as GroupCodes or MicroscaledCodes, number for number.

The layouts are those of ggml's ``block_q*`` structures. ``gguf.quants`` knows only the way to floats.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from headrace.quant.float_codes import MicroscaledCodes
from headrace.quant.groups import GROUP, GroupCodes

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Decoded = tuple[int, Bytes, Floats, Floats | int]
"""bits, codes [blocks, block size], scales [blocks, groups of a block], and minima alike or the zero point of all."""
_IQ4 = np.array((1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241), dtype=np.uint8)
"""Codes of 8 bits for the numbers of ggml's table ``kvalues_iq4nl``: 128 more than these."""


def decode(blocks: Bytes, kind: GGMLQuantizationType) -> GroupCodes | MicroscaledCodes | None:
    """Decodes a file's matrix to codes and scales; None if its type has another form.

    Args:
        blocks: ``[N, bytes of a row]``
    """
    rows = blocks.shape[0]
    values, size = GGML_QUANT_SIZES[kind]
    split = np.ascontiguousarray(blocks).reshape(-1, size)
    if kind is GGMLQuantizationType.MXFP4:
        numbers = _nibbles(split[:, 1:])
        pairs = numbers[:, ::2] | numbers[:, 1::2] << np.uint8(4)
        return MicroscaledCodes(_rows(pairs, rows).view(rows, -1, GROUP // 2), _rows(split[:, :1], rows))
    if (decoder := _DECODERS.get(kind)) is None:
        return None
    bits, codes, scales, offsets = decoder(split)
    held = _rows(scales, rows)
    shifts = torch.full_like(held, offsets, dtype=torch.uint8) if isinstance(offsets, int) else _rows(offsets, rows)
    return GroupCodes(bits, _rows(codes, rows), held, shifts, values // scales.shape[1])


def _rows(values: npt.NDArray[np.generic], rows: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(rows, -1))


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
    codes = _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << np.uint8(4))
    return 8, codes + np.uint8(112), d, -128 * d


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


def _pairs_of_bits(data: Bytes) -> Bytes:
    """``[blocks, 32 n]`` -> ``[blocks, 128 n]``: of each 32 bytes the lowest two bits, then the next."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return ((data.reshape(len(data), -1, 1, GROUP) >> shifts) & np.uint8(3)).reshape(len(data), -1)


def _q2_k(blocks: Bytes) -> Decoded:
    d, least = _half(blocks[:, 80:82]), _half(blocks[:, 82:84])
    scales = d * (blocks[:, :16] & 15).astype(np.float32)
    return 4, _pairs_of_bits(blocks[:, 16:80]), scales, -least * (blocks[:, :16] >> 4).astype(np.float32)


def _q3_k(blocks: Bytes) -> Decoded:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    factors = np.concatenate((low & 15, low >> 4), axis=1)
    factors |= np.concatenate([(high >> np.uint8(shift) & np.uint8(3)) << np.uint8(4) for shift in (0, 2, 4, 6)], axis=1)
    # The bit that is apart adds 4 to codes of 0 to 3.
    added = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    codes = _pairs_of_bits(blocks[:, 32:96]) + (added << np.uint8(2)).reshape(len(blocks), -1)
    return 4, codes + np.uint8(4), _half(blocks[:, 108:]) * (factors.astype(np.float32) - 32), 8


def _q6_k(blocks: Bytes) -> Decoded:
    low = blocks[:, :128].reshape(len(blocks), 2, 64)
    codes = np.concatenate((low & 15, low >> 4), axis=2).reshape(len(blocks), -1)
    codes |= _pairs_of_bits(blocks[:, 128:192]) << np.uint8(4)
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return 8, codes + np.uint8(96), scales, 128


def _iq4_nl(blocks: Bytes) -> Decoded:
    return 8, _IQ4[_nibbles(blocks[:, 2:])], _half(blocks[:, :2]), 128


def _iq4_xs(blocks: Bytes) -> Decoded:
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(len(blocks), 8)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    scales = _half(blocks[:, :2]) * (low + 16 * high.astype(np.float32) - 32)
    codes = _IQ4[_nibbles(blocks[:, 8:].reshape(len(blocks), 8, 16))]
    return 8, codes.reshape(len(blocks), -1), scales, 128


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
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.IQ4_NL: _iq4_nl,
    GGMLQuantizationType.IQ4_XS: _iq4_xs,
}
