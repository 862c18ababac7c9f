"""Tilings of the products with packed integers, and the rows and weights for which each was fastest."""

from __future__ import annotations

import dataclasses
import math

from headrace.kernels import support
from headrace.kernels.linear.wna16_reference import MAX_TILES, STEP, PackedWeight
from headrace.kernels.support import cdiv


@dataclasses.dataclass(frozen=True)
class PackedFewTiling:
    """A program makes ``outputs`` numbers of each row; each of its warps has a run of the inputs at a time."""

    outputs: int = 16
    warps: int = 4
    ahead: int = 4
    """Runs of a warp whose words are loaded ahead, from before the kernel before is complete."""
    x_ahead: int = 2
    """Runs of x that are loaded ahead; fewer, because x is in the cache."""
    registers: int | None = None
    """Registers of a thread; None: as many as the compiler takes."""


@dataclasses.dataclass(frozen=True)
class PackedManyTiling:
    """A program makes ``rows`` by ``outputs`` numbers, of a part of the inputs."""

    rows: int
    outputs: int = 64
    """A multiple of ``16 * warps``, which is one of 64."""
    warps: int = 4
    stages: int = 3
    """Steps of the inputs that are in flight."""
    parts: int = 1
    near: int = 0
    """Runs of the weight that are fetched into the L2 cache before the kernel before is complete; a power of two or 0."""


INVARIANT = PackedManyTiling(rows=64)
"""The tiling of any number of rows where no row's result may depend on the others."""


def choose_few(weight: PackedWeight) -> PackedFewTiling:
    """Chooses by measurements on an H200. Codes of 8 bits, and scales of small groups, take registers."""
    if weight.bits == 8 and weight.middles is None and len(weight.scales) == 1 and weight.inputs <= 4096:
        return PackedFewTiling(registers=128)
    if weight.split > 1 or weight.bits == 8:
        return PackedFewTiling(ahead=2)
    if weight.middles is not None:
        return PackedFewTiling(ahead=8)
    # Where three programs on each multiprocessor are not all, four are faster, which leaves each thread 128 registers.
    three = 3 * support.resources(weight.words.device).multiprocessors * PackedFewTiling.outputs
    crowded = weight.outputs > three and weight.inputs <= 4096
    return PackedFewTiling(ahead=16, registers=128 if crowded else None)


_SIZES = ((16, 4, 0.92, 0.92), (32, 4, 0.92, 0.92), (64, 3, 0.92, 0.67), (128, 2, 1.08, 1.02))
"""Rows of a tile, the programs that a multiprocessor runs at a time, and the microseconds of a run of inputs meanwhile: beside
as many, and beside one at most."""
_START, _SUM = 2.5, 5.0
"""Microseconds until programs compute, and those that adding parts takes."""


def choose_many(rows: int, weight: PackedWeight) -> PackedManyTiling:
    """Chooses the tiling for which as many programs as run at a time take the least time, as measured on an H200."""
    runs, across = weight.words.shape[1], cdiv(weight.outputs, PackedManyTiling.outputs)
    multiprocessors = support.resources(weight.words.device).multiprocessors
    smallest = next((size for size, *_ in _SIZES if size >= rows), _SIZES[-1][0])
    best, least = PackedManyTiling(rows=smallest), math.inf
    for size, abreast, crowded, beside_one in _SIZES:
        if size < min(smallest, 64) or size > smallest:
            continue
        tiles = across * cdiv(rows, size)
        for parts in (1, 2, 4, 6, 8):
            programs = tiles * parts
            waves = cdiv(programs, abreast * multiprocessors)
            each = beside_one if programs <= 2 * multiprocessors else crowded
            time = waves * (cdiv(runs, parts) * each + _START) + _SUM * (parts > 1)
            if time < least and (parts == 1 or tiles <= MAX_TILES) and (parts <= 4 or waves == 1):
                # What leaves room in shared memory has more in flight.
                stages = 4 if size <= 32 or (size == 64 and programs <= 2 * multiprocessors) else 3
                best, least = PackedManyTiling(size, stages=stages, parts=parts, near=4 if rows <= 64 else 0), time
    return best


def many_rows(weight: PackedWeight) -> int:
    """Up to how many rows a packed product is faster than one with the dequantised weight, as measured on an H200. Scales of
    small groups cost more than the weight's way to memory and back."""
    small = weight.group <= STEP and (weight.bits == 8 or weight.middles is not None)
    return 0 if small else 384
