"""The table of tilings chooses the kernel of an FP8 product by its rows and the shape of its weight."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.linear.fp8_reference import GROUP, Fp8Weight
from headrace.kernels.linear.fp8_tilings import FEW_ROWS, FewTiling, Library, SingleTiling, WideTiling, choose

SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (6144, 1024), (1024, 3072), (128, 128), (2112, 7168)]
"""(outputs, inputs)"""


def weight_of(outputs: int, inputs: int, *, in_blocks: bool) -> Fp8Weight:
    scales = torch.empty((-(-outputs // GROUP), inputs // GROUP) if in_blocks else (outputs, 1), device="meta")
    turns = torch.empty(-(-outputs // 64), dtype=torch.int32, device="meta")
    return Fp8Weight(torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device="meta"), scales, scales, turns)


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("in_blocks", [False, True], ids=["outputs", "blocks"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_choice_takes_its_rows(shape: tuple[int, int], in_blocks: bool, hopper: bool) -> None:
    weight = weight_of(*shape, in_blocks=in_blocks)
    for rows in (*range(1, 300), 1000, 100_000):
        match choose(rows, weight, hopper=hopper):
            case SingleTiling():
                assert rows == 1
            case FewTiling() as few:
                assert rows <= FEW_ROWS and GROUP % few.outputs == 0
            case WideTiling() as wide:
                assert hopper and wide.num_warps * 16 == wide.outputs and GROUP % wide.outputs == 0
                tiles = -(-shape[0] // wide.outputs) * -(-rows // wide.rows)
                assert wide.split == 1 or tiles <= len(weight.turns)
                # Stages of both factors fit into the memory of a multiprocessor.
                assert wide.stages * (wide.outputs + wide.rows) * GROUP < 227 << 10
            case library:
                assert in_blocks == (library == Library.BY_BLOCK)


@pytest.mark.parametrize(
    ("outputs", "inputs", "library"), [(4096, 4096, True), (4096, 1408, False), (4096, 128, False), (2112, 7168, False)]
)
def test_cublaslt_has_whole_blocks_and_those_of_channels_in_fours(outputs: int, inputs: int, library: bool) -> None:
    weight = weight_of(outputs, inputs, in_blocks=True)
    assert (choose(4096, weight, hopper=True) == Library.BY_BLOCK) == library
