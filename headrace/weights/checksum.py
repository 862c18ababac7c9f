"""Sums by which weights are compared: of their bits, mixed with their places in a checkpoint, in integers on the device."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from headrace.core.weights import PartSum
from headrace.weights.names import StoredLayout, Target

_MIX = -7046029254386353131
_CHUNK = 2**22
_INTEGERS = {1: torch.uint8, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> int:
    """Returns a 64-bit sum of the tensor's bits, which its device and layout do not change. Floats of 16 bits count as those
    of 32 that they are."""
    value = _with_axes(tensor.detach())
    return _value(_summed(value, _places(None, tuple(value.shape))))


def part_sums(target: Target, parameter: torch.Tensor) -> list[PartSum]:
    """Returns the sums of what a rank's parameter holds of a checkpoint's tensor, at its places there. All parts of all ranks
    add up to the tensor's ``checksum``."""
    held, part = _with_axes(target.view(parameter.detach())), target.part
    shape = tuple(held.shape) if part is None else part.shape
    axis, ranges = (0, ((0, shape[0]),)) if part is None else (part.axis, part.ranges)
    places, sums, at = _places(target.layout, shape), list[PartSum](), 0
    for start, stop in ranges:
        own = [one[start:stop] if index == axis else one for index, one in enumerate(places)]
        value = _value(_summed(held.narrow(axis, at, stop - start), own))
        sums.append(PartSum(start, stop, shape[axis], value))
        at += stop - start
    return sums


def packed_sum(tensors: Iterable[torch.Tensor], rank: int) -> PartSum:
    """Returns the sum of all bits in which a rank keeps weights in another form than checkpoints."""
    total = functools.reduce(lambda so_far, tensor: so_far * _MIX + checksum(tensor), tensors, rank)
    return PartSum(rank, rank + 1, 0, total % 2**64)


def _places(layout: StoredLayout | None, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns for each axis of a tensor of ``shape`` what each index adds to the place in the stored tensor."""
    order = list(range(len(shape)))
    if layout is not None and layout.transposed:
        order[-2:] = order[-1], order[-2]
    places = [torch.arange(length) for length in shape]
    if layout is not None and layout.rows is not None:
        places[layout.axis] = torch.tensor(layout.rows())
    step = 1
    for axis in reversed(order):
        places[axis] = places[axis] * step
        step *= shape[axis]
    return places


def _with_axes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape or (1,))


@torch.inference_mode()
def _summed(tensor: torch.Tensor, places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum, int64. ``tensor``: ``[places of axis 0, places of axis 1, ...]``."""
    first, *others = (one.to(tensor.device) for one in places)
    row = torch.ones(1, dtype=torch.int64, device=tensor.device)
    for one in others:
        row = (row[:, None] + one).view(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = max(1, _CHUNK // max(1, len(row)))
    for start in range(0, len(first), step):
        bits = _bits(tensor[start : start + step]).reshape(-1, len(row))
        place = (first[start : start + step, None] + row) * _MIX
        mixed = (bits ^ place) * _MIX
        total += (mixed ^ (mixed >> 29)).sum()
    return total


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    elif tensor.dtype.itemsize == 2:
        return tensor.view(torch.int16).long()
    return tensor.view(_INTEGERS[tensor.dtype.itemsize]).long()


def _value(total: torch.Tensor) -> int:
    return int(total.item()) % 2**64
