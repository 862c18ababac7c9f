"""Sums by which weights are compared: of their bits, mixed with their places, in integers on the device."""

from __future__ import annotations

import torch

_MIX = -7046029254386353131
_CHUNK = 2**22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.inference_mode()
def checksum(tensor: torch.Tensor) -> int:
    """Returns a 64-bit sum of the tensor's bits, which its device and layout do not change."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), _CHUNK):
        part = bits[first : first + _CHUNK].long()
        place = torch.arange(first + 1, first + 1 + len(part), device=bits.device) * _MIX
        mixed = (part ^ place) * _MIX
        total += (mixed ^ (mixed >> 29)).sum()
    return int(total.item()) & (2**64 - 1)
