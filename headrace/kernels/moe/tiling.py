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
    fetch: bool = False
    """The tensor memory accelerator brings weights, and rows that lie in order, where the device has one and they fit."""


_Pair = tuple[MoeTiling, MoeTiling]
"""Tilings of the first product, which is two, and of the second."""


def _both(tokens: int, outputs: int, channels: int, num_warps: int, num_stages: int) -> _Pair:
    tiling = MoeTiling(tokens, outputs, channels, num_warps, num_stages, swap=True)
    return tiling, tiling


_FP8 = {
    16: (MoeTiling(16, 64, 256, 4, 2, swap=True, fetch=True),) * 2,
    32: _both(32, 128, 128, 8, 3),
}
_SOME_FP8 = MoeTiling(64, 64, 128, 4, 4, swap=True, fetch=True), MoeTiling(64, 128, 128, 4, 3, fetch=True)
_MANY_FP8 = MoeTiling(128, 128, 128, 8, 3, fetch=True), MoeTiling(128, 128, 128, 4, 3, fetch=True)
_MANY_BLOCKS = MoeTiling(64, 64, 128, 4, 3, swap=True), MoeTiling(128, 64, 128, 8, 3)
_MANY = _both(64, 128, 128, 8, 4)
_INTEGERS = {8: _both(8, 64, 128, 4, 4), 16: _both(16, 64, 128, 4, 4), 64: _both(32, 128, 128, 8, 3)}
_WEIGHTED = {8: _both(8, 128, 128, 4, 3), 16: _both(16, 128, 128, 4, 3), 32: _both(32, 128, 128, 4, 3)}
_MANY_WEIGHTED = _both(64, 128, 128, 4, 3)
_MXFP4 = {8: _both(8, 64, 128, 4, 4), 32: _both(32, 128, 128, 8, 3), 512: _MANY}
_FLOATS = {
    16: (MoeTiling(16, 64, 128, 4, 3, swap=True, fetch=True), MoeTiling(16, 64, 128, 4, 3, fetch=True)),
    32: (MoeTiling(32, 64, 128, 4, 3, fetch=True),) * 2,
    128: (MoeTiling(64, 64, 64, 4, 4, fetch=True), MoeTiling(64, 128, 64, 4, 3, fetch=True)),
}
_MANY_FLOATS = MoeTiling(128, 128, 64, 8, 4, fetch=True), MoeTiling(128, 256, 64, 8, 3, fetch=True)
_TILINGS: Mapping[Kind, tuple[Mapping[int, _Pair], _Pair]] = {
    "floats": (_FLOATS, _MANY_FLOATS),
    "e4m3": ({**_FP8, 256: _SOME_FP8}, _MANY_FP8),
    "e4m3_blocks": ({**_FP8, 64: _both(64, 64, 128, 4, 3)}, _MANY_BLOCKS),
    "int4": (_INTEGERS, _MANY),
    "int4_minima": (_WEIGHTED, _MANY_WEIGHTED),
    "int8": (_INTEGERS, _MANY),
    "int8_minima": (_WEIGHTED, _MANY_WEIGHTED),
    "mxfp4": (_MXFP4, (MoeTiling(128, 128, 128, 8, 3, swap=True), _MANY[1])),
    "int4_e4m3": (
        {16: _both(16, 64, 128, 4, 3), 64: _both(32, 64, 128, 4, 4)},
        (MoeTiling(64, 128, 128, 4, 4, swap=True), _MANY[1]),
    ),
}
"""Kind -> the tilings for twice an expert's average rows up to some number, and for more. Floats are those of 16 bits that are
fetched. The fastest of those that were measured on an H200, for the experts of Qwen3-30B-A3B."""


def choose_tiling(
    choices: int,
    num_experts: int,
    in_features: int,
    out_features: int,
    itemsize: int,
    kind: Kind = "floats",
    *,
    paired: bool = False,
    fetches: bool = False,
) -> MoeTiling:
    """Chooses the tiling by the rows that an expert gets on average: few make the product a matter of reading weights.

    Args:
        choices: tokens times experts of a token.
        itemsize: bytes of a float: wider ones are read fewer at a time, for they must fit in a program's shared memory.
        paired: a program has the outputs of gate and up.
        fetches: the device brings tiles of the weight by itself.
    """
    average = -(-choices // num_experts)
    wide, deep = max(_power(out_features), 16), max(_power(in_features), 16)
    if kind == "floats" and not fetches:
        rows = min(max(_power(average), 16), 128)
        channels = min((128 if rows > 16 else 256) // max(itemsize, 2), deep)
        return MoeTiling(rows, min(64 if rows < 128 else 128, wide), channels, 8 if rows == 128 else 4, 3)
    few, many = _TILINGS[kind]
    # Half the experts have more rows than the average.
    pair = next((pair for most, pair in few.items() if 2 * average <= most), many)
    found = pair[0 if paired else 1]
    if kind == "floats":
        found = dataclasses.replace(found, outputs=min(found.outputs, wide), channels=min(found.channels, deep))
    return found


def batch_invariant_tiling(
    in_features: int, out_features: int, itemsize: int, kind: Kind = "floats", *, paired: bool = False
) -> MoeTiling:
    """One shape for any number of tokens: it settles the instruction, and with it the order in which products are summed up."""
    return choose_tiling(32 if kind != "floats" else 64, 1, in_features, out_features, itemsize, kind, paired=paired)


def most_tiles(choices: int, num_experts: int, tokens: int) -> int:
    """Returns the most tiles of ``tokens`` choices of one expert each that any routing makes of ``choices`` choices."""
    busy = min(choices, num_experts)
    return busy + (choices - busy) // tokens


def _power(size: int) -> int:
    """The least power of two from ``size`` on."""
    return 1 << (size - 1).bit_length()
