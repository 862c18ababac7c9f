"""Sizes of the tiles in which experts' products are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from headrace.kernels.moe.codes import ExpertKind

Kind = ExpertKind | Literal["floats"]


@dataclasses.dataclass(frozen=True)
class MoeTiling:
    """A program makes ``outputs`` numbers of ``tokens`` rows and reads ``channels`` of them at a time."""

    tokens: int
    outputs: int
    channels: int
    num_warps: int
    num_stages: int
    swap: bool = False
    """Weights are the left factor, whose rows are 64 at least in Hopper's instructions."""


_FP8 = {
    16: MoeTiling(16, 64, 256, 4, 2, swap=True),
    32: MoeTiling(32, 128, 128, 8, 3, swap=True),
    64: MoeTiling(64, 64, 128, 4, 3, swap=True),
}
_MANY = MoeTiling(64, 128, 128, 8, 4, swap=True)
_INTEGERS = {
    8: MoeTiling(8, 64, 128, 4, 4, swap=True),
    16: MoeTiling(16, 64, 128, 4, 4, swap=True),
    64: MoeTiling(32, 128, 128, 8, 3, swap=True),
}
_CODED: Mapping[ExpertKind, tuple[Mapping[int, MoeTiling], MoeTiling, MoeTiling]] = {
    "e4m3": (_FP8, MoeTiling(128, 128, 128, 8, 3), _MANY),
    "e4m3_blocks": (_FP8, MoeTiling(64, 64, 128, 4, 3, swap=True), MoeTiling(128, 64, 128, 8, 3)),
    "int4": (_INTEGERS, _MANY, _MANY),
    "int4_minima": (_INTEGERS, _MANY, _MANY),
    "int8": (_INTEGERS, _MANY, _MANY),
    "int8_minima": (_INTEGERS, _MANY, _MANY),
    "mxfp4": (
        {8: MoeTiling(8, 64, 128, 4, 4, swap=True), 32: MoeTiling(32, 128, 128, 8, 3, swap=True), 512: _MANY},
        MoeTiling(128, 128, 128, 8, 3, swap=True),
        _MANY,
    ),
    "int4_e4m3": (
        {16: MoeTiling(16, 64, 128, 4, 3, swap=True), 64: MoeTiling(32, 64, 128, 4, 4, swap=True)},
        MoeTiling(64, 128, 128, 4, 4, swap=True),
        _MANY,
    ),
}
"""Kind -> the tiling for most rows of an expert, and for more: of the first product, which is two, and of the second. The
fastest of those that were measured on an H200, for the experts of Qwen3-30B-A3B."""


def choose_tiling(
    choices: int,
    num_experts: int,
    in_features: int,
    out_features: int,
    itemsize: int,
    kind: Kind = "floats",
    *,
    paired: bool = False,
) -> MoeTiling:
    """Chooses the tiling by the rows that an expert gets on average: few make the product a matter of reading weights.

    Args:
        choices: tokens times experts of a token.
        itemsize: bytes of a float: wider ones are read fewer at a time, for they must fit in a program's shared memory.
        paired: a program has the outputs of gate and up.
    """
    average = -(-choices // num_experts)
    if kind != "floats":
        few, first, second = _CODED[kind]
        # Half the experts have more rows than the average.
        return next((tiling for most, tiling in few.items() if 2 * average <= most), first if paired else second)
    rows = min(max(_power(average), 16), 128)
    channels = min((128 if rows > 16 else 256) // max(itemsize, 2), max(_power(in_features), 16))
    outputs = min(64 if rows < 128 else 128, max(_power(out_features), 16))
    return MoeTiling(rows, outputs, channels, 8 if rows == 128 else 4, 3)


def batch_invariant_tiling(in_features: int, out_features: int, itemsize: int, kind: Kind = "floats") -> MoeTiling:
    """One shape for any number of tokens: it settles the instruction, and with it the order in which products are summed up."""
    return choose_tiling(32 if kind != "floats" else 64, 1, in_features, out_features, itemsize, kind)


def most_tiles(choices: int, num_experts: int, tokens: int) -> int:
    """Returns the most tiles of ``tokens`` choices of one expert each that any routing makes of ``choices`` choices."""
    busy = min(choices, num_experts)
    return busy + (choices - busy) // tokens


def _power(size: int) -> int:
    """The least power of two from ``size`` on."""
    return 1 << (size - 1).bit_length()
