"""Tilings of the products in FP8, and the rows and weights for which each was fastest."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

from headrace.kernels.linear.fp8_reference import GROUP, Fp8Weight

FEW_ROWS = 16
"""Most rows of the kernel for few rows."""


@dataclasses.dataclass(frozen=True)
class FewTiling:
    """A program makes ``outputs`` numbers of each row, 8 to 32; each of its warps reads ``GROUP`` channels at a time."""

    outputs: int
    num_warps: int
    ahead: int
    """Tiles of the weight in flight."""


@dataclasses.dataclass(frozen=True)
class SingleTiling:
    """A program makes ``outputs`` numbers of one row, without matrix units, and reads ``channels`` of each at a time."""

    outputs: int
    channels: int
    num_warps: int
    ahead: int
    """Tiles of the weight in flight."""


@dataclasses.dataclass(frozen=True)
class WideTiling:
    """A program multiplies ``outputs`` lines of the weight, 64 for each four warps, by ``rows`` rows. The tensor memory
    accelerator loads both."""

    outputs: int
    rows: int
    num_warps: int
    stages: int
    """Tiles of ``GROUP`` channels in flight."""
    split: int = 1
    """Programs that share the channels of a tile. The last to be done adds up what all have."""


class Library(enum.Enum):
    """Ways of cuBLASLt to multiply."""

    UNSCALED = enum.auto()
    """Without scales, which a kernel applies."""
    BY_ROW = enum.auto()
    """With a scale for each row and output."""
    BY_BLOCK = enum.auto()


Choice = FewTiling | SingleTiling | WideTiling | Library
_Table = Sequence[tuple[float, float, float, Choice]]
"""Largest numbers of rows, channels and outputs, and their choice: the first line counts in which all three fit. As measured on
an H200 with the products of Qwen3 0.6B and 8B in the chain of a layer (see benchmarks/)."""
_ANY = math.inf
_DEEP, _NARROW = 8192, 16384
"""A product with more channels has its own line, and one with more outputs."""

_BY_OUTPUT: _Table = (
    (1, 1024, _ANY, SingleTiling(4, 1024, 4, 1)),
    (1, _DEEP, _ANY, SingleTiling(2, 2048, 4, 2)),
    (1, _ANY, _ANY, SingleTiling(2, 1024, 2, 2)),
    (8, _DEEP, _NARROW, FewTiling(16, 4, 8)),
    (FEW_ROWS, _DEEP, _NARROW, FewTiling(16, 4, 6)),
    (FEW_ROWS, _DEEP, _ANY, WideTiling(64, 16, 4, 6)),
    (FEW_ROWS, _ANY, _ANY, WideTiling(64, 16, 4, 8, split=4)),
    (32, _DEEP, 4096, WideTiling(64, 32, 4, 13, split=2)),
    (32, _DEEP, _NARROW, WideTiling(64, 32, 4, 10)),
    (256, _ANY, 4096, Library.UNSCALED),
    (64, _DEEP, _NARROW, WideTiling(64, 64, 4, 10)),
    (128, 1024, _NARROW, WideTiling(64, 128, 4, 6)),
    (256, _ANY, _NARROW, Library.UNSCALED),
    (_ANY, _ANY, _ANY, Library.BY_ROW),
)
_BY_BLOCK: _Table = (
    (1, 1024, _ANY, SingleTiling(4, 1024, 4, 1)),
    (1, 3072, _ANY, SingleTiling(2, 2048, 4, 2)),
    (1, _ANY, _ANY, SingleTiling(2, 1024, 2, 2)),
    (8, 1024, _ANY, FewTiling(16, 2, 8)),
    (8, _DEEP, _NARROW, FewTiling(16, 4, 8)),
    (FEW_ROWS, _DEEP, _NARROW, WideTiling(64, 16, 4, 6, split=4)),
    (FEW_ROWS, _DEEP, _ANY, WideTiling(64, 16, 4, 6)),
    (FEW_ROWS, _ANY, _ANY, WideTiling(64, 16, 4, 8, split=4)),
    (32, _DEEP, 4096, WideTiling(64, 32, 4, 6, split=4)),
    (32, _DEEP, _NARROW, WideTiling(64, 32, 4, 8, split=2)),
    (32, _DEEP, _ANY, WideTiling(64, 32, 4, 6)),
    (32, _ANY, _ANY, WideTiling(64, 32, 4, 8, split=4)),
    (64, _DEEP, 4096, WideTiling(64, 64, 4, 7, split=2)),
    (64, _DEEP, _NARROW, WideTiling(64, 64, 4, 6, split=2)),
    (64, _DEEP, _ANY, WideTiling(64, 64, 4, 4)),
    (64, _ANY, _ANY, WideTiling(64, 64, 4, 5, split=4)),
    (128, _DEEP, 4096, WideTiling(64, 128, 4, 6, split=2)),
    (128, _DEEP, _NARROW, WideTiling(64, 128, 4, 6)),
    (128, _ANY, 4096, WideTiling(64, 128, 4, 4, split=4)),
    (_ANY, _ANY, _ANY, Library.BY_BLOCK),
)


_LONG_ROWS = WideTiling(64, 128, 4, 6)
"""The tiling for many rows of a weight that cuBLASLt's product by blocks does not take."""
INVARIANT = WideTiling(64, 64, 4, 4)
"""The tiling of any number of rows where no row's result may depend on the others: one instruction, and one order of sums."""


def choose(rows: int, weight: Fp8Weight, *, hopper: bool) -> Choice:
    """Returns how so many rows are multiplied by the weight. ``WideTiling`` is for Hopper: others leave these lines out."""
    outputs, inputs = weight.codes.shape
    for most, widest, longest, choice in _BY_BLOCK if weight.in_blocks else _BY_OUTPUT:
        fits = rows <= most and inputs <= widest and outputs <= longest
        if fits and (hopper or not isinstance(choice, WideTiling)):
            # cuBLASLt takes whole blocks, and their scales along channels in fours.
            whole = weight.tall == GROUP and outputs % GROUP == inputs % (4 * GROUP) == 0
            own = choice is Library.BY_BLOCK and hopper and not whole
            return _LONG_ROWS if own else choice
    raise AssertionError("the last line of a table fits everything")
