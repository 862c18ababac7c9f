"""Products of 17 and more rows with a weight in FP8, with Hopper's matrix units. References:
``headrace.kernels.linear.fp8_reference``.

Outputs are the side of which an instruction takes 64, rows of x the other. So few rows need no padding to 64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.kv_cache.triton_fp8 import NATIVE, as_bytes, gain, mode, to_half
from headrace.kernels.linear.fp8_reference import GROUP, Fp8Rows, Fp8Weight
from headrace.kernels.linear.fp8_tilings import WideTiling
from headrace.kernels.support import cdiv
from headrace.kernels.triton_pdl import announce, options, wait

_GROUP = tl.constexpr(GROUP)


@triton.jit
def _multiply(left, right, sums, MODE: tl.constexpr, MOST: tl.constexpr):
    """Adds a product. The matrix units keep about 14 bits of a sum, of ``MOST`` terms; None: of all."""
    if MODE == 1:
        return tl.dot(left, right, sums, max_num_imprecise_acc=MOST)
    return tl.dot(to_half(left, MODE), to_half(right, MODE), sums)


@triton.jit
def gather_sums(sums, parts, turns, tile, split, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):
    """Adds up the sums of the programs of a tile, in their order. The last program to come gets (True, all sums)."""
    SIZE: tl.constexpr = OUTPUTS * ROWS
    place = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    own = parts + tile.to(tl.int64) * (split * SIZE)
    tl.store(own + tl.program_id(1) * SIZE + place, sums)
    # All of the program's threads have stored before one of them says so.
    tl.debug_barrier()
    last = tl.atomic_add(turns + tile, 1, sem="acq_rel", scope="gpu") == split - 1
    if last:
        sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for part in range(split):
            sums += tl.load(own + part * SIZE + place, cache_modifier=".cg")
        tl.store(turns + tile, 0)
    return last, sums


@triton.jit(do_not_specialize=["rows", "split"])
def _fp8_wide(
    x, x_scales, weight, scales, bias, y, parts, turns, rows, out, inputs, split, scale_column: tl.int64, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr, MODE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """A tile of outputs and rows; the second axis of programs shares its channels. x and weight are tensor descriptors."""
    announce(PDL)
    tile, down = tl.program_id(0), tl.cdiv(rows, ROWS)
    # Programs side by side read the same lines of the weight.
    first, row_first = tile // down * OUTPUTS, tile % down * ROWS
    output, row = first + tl.arange(0, OUTPUTS), row_first + tl.arange(0, ROWS)
    present, row_present = output < out, row < rows
    steps = tl.cdiv(inputs, _GROUP)
    begin, end = tl.program_id(1) * steps // split, (tl.program_id(1) + 1) * steps // split
    if BLOCKS:
        block = scales + first // BLOCKS * steps
        factor = tl.load(block + begin)
    else:
        factor = tl.load(scales + output, mask=present, other=0.0)
    if BIAS:
        more = tl.load(bias + output, mask=present, other=0.0).to(tl.float32)
    wait(PDL)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        left = weight.load([first, step * _GROUP])
        right = tl.trans(x.load([row_first, step * _GROUP]))
        if BLOCKS:
            tall = tl.load(x_scales + step * scale_column + row, mask=row_present, other=0.0)
            here = factor
            factor = tl.load(block + tl.minimum(step + 1, end - 1))
            product = _multiply(left, right, tl.zeros([OUTPUTS, ROWS], tl.float32), MODE, None)
            sums += product * (tall * here)[None, :]
        else:
            sums = _multiply(left, right, sums, MODE, _GROUP)
    done = True
    if SPLIT:
        done, sums = gather_sums(sums, parts, turns, tile, split, OUTPUTS, ROWS)
    if done:
        sums = sums * (gain(MODE) * gain(MODE))
        if not BLOCKS:
            tall = tl.load(x_scales + row, mask=row_present, other=0.0)
            sums = sums * (factor[:, None] * tall[None, :])
        if BIAS:
            sums += more[:, None]
        place = y + row.to(tl.int64)[:, None] * out + output[None, :]
        tl.store(place, tl.trans(sums).to(y.dtype.element_ty), mask=row_present[:, None] & present[None, :])


def wide(x: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype, tiling: WideTiling) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.linear.fp8_reference.fp8_linear_ref``.

    Raises:
        ValueError: rows and weight do not fit each other, or more tiles are shared than the weight has turns for.
    """
    outputs, inputs = weight.codes.shape
    device, how = x.codes.device, mode(x.codes.device)
    if x.codes.shape[1] != inputs:
        raise ValueError(f"rows of {x.codes.shape[1]} and a weight {[outputs, inputs]} do not fit each other")
    y = torch.empty(x.rows, outputs, dtype=out_dtype, device=device)
    tiles = cdiv(outputs, tiling.outputs) * cdiv(x.rows, tiling.rows)
    parts = y
    if tiling.split > 1:
        if tiles > len(weight.turns):
            raise ValueError(f"{tiles} tiles are shared, and the weight has turns for {len(weight.turns)}")
        parts = torch.empty(tiles * tiling.split * tiling.outputs * tiling.rows, dtype=torch.float32, device=device)
    left, right = (codes if how == NATIVE else as_bytes(codes) for codes in (weight.codes, x.codes[: x.rows]))
    _fp8_wide[(tiles, tiling.split)](
        TensorDescriptor.from_tensor(right, [tiling.rows, GROUP]), x.scales,
        TensorDescriptor.from_tensor(left, [tiling.outputs, GROUP]), weight.scales, y if bias is None else bias, y, parts,
        weight.turns, x.rows, outputs, inputs, tiling.split, x.scales.stride(1), OUTPUTS=tiling.outputs, ROWS=tiling.rows,
        SPLIT=tiling.split > 1, BLOCKS=weight.tall, BIAS=bias is not None, MODE=how, STAGES=tiling.stages,
        num_warps=tiling.num_warps, num_stages=tiling.stages, **options(device),
    )  # fmt: skip
    return y
