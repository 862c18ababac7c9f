"""One tile of attention, queries against keys and values that lie one token after another: loaded by the tensor memory unit.

Hopper's unit copies a whole tile at the request of one thread, so that the others' registers and instructions are left to
the softmax. Parts of heads are those of ``attention.triton_tile``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.attention.tiling import cut
from headrace.kernels.support import in_pieces


@triton.jit
def _take_copies(
    start, first_key, column, high, highest, total, acc_a, acc_b, q_a, q_b, position, factor, keys_a, keys_b, values_a,
    values_b, BLOCK_N: tl.constexpr, D: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr, DV_A: tl.constexpr,
    DV_B: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Takes in the row's keys ``start ... start + BLOCK_N``, as ``triton_tile.take_tile`` does.

    Not ``MASKED``: every query sees every key.
    """
    place = first_key + start
    scores = tl.dot(q_a, keys_a.load([place, column]).T, input_precision=PRECISION)
    if D_B > 0:
        scores = tl.dot(q_b, keys_b.load([place, column + D_A]).T, scores, input_precision=PRECISION)
    key = start + tl.arange(0, BLOCK_N)
    if MASKED:
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    # Scaling the maximum, and not all scores, leaves one multiply-add for each.
    new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
    pivot = new_highest
    if MASKED:
        pivot = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores * factor - pivot[:, None])
    decay = tl.exp2(highest - pivot)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(q_a.dtype)
    v_a = values_a.load([place, column + D])
    if MASKED:
        # Behind the row's last key there are another row's.
        v_a = tl.where((key < high)[:, None], v_a, 0.0)
    acc_a = tl.dot(weights, v_a, acc_a * decay[:, None], input_precision=PRECISION)
    if DV_B > 0:
        v_b = values_b.load([place, column + D + DV_A])
        if MASKED:
            v_b = tl.where((key < high)[:, None], v_b, 0.0)
        acc_b = tl.dot(weights, v_b, acc_b * decay[:, None], input_precision=PRECISION)
    return new_highest, total, acc_a, acc_b


@triton.jit
def walk_copies(
    entries, full, count, first_key, column, high, highest, total, acc_a, acc_b, q_a, q_b, position, factor, keys_a,
    keys_b, values_a, values_b, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_A: tl.constexpr,
    D_B: tl.constexpr, DV_A: tl.constexpr, DV_B: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Takes in the blocks that ``entries`` lists: ``count`` of them, of which all queries see the first ``full`` whole."""
    per_block: tl.constexpr = BLOCK // BLOCK_N
    # The next block's number is loaded a tile ahead; behind the last one there is room for a number that is not used.
    block = tl.load(entries).to(tl.int32)
    for i in range(full * per_block):
        start = block * BLOCK + i % per_block * BLOCK_N
        block = tl.load(entries + (i + 1) // per_block).to(tl.int32)
        highest, total, acc_a, acc_b = _take_copies(
            start, first_key, column, high, highest, total, acc_a, acc_b, q_a, q_b, position, factor, keys_a, keys_b,
            values_a, values_b, BLOCK_N, D, D_A, D_B, DV_A, DV_B, PRECISION, False,
        )  # fmt: skip
    for i in range(full * per_block, count * per_block):
        start = block * BLOCK + i % per_block * BLOCK_N
        block = tl.load(entries + (i + 1) // per_block).to(tl.int32)
        highest, total, acc_a, acc_b = _take_copies(
            start, first_key, column, high, highest, total, acc_a, acc_b, q_a, q_b, position, factor, keys_a, keys_b,
            values_a, values_b, BLOCK_N, D, D_A, D_B, DV_A, DV_B, PRECISION, True,
        )  # fmt: skip
    return highest, total, acc_a, acc_b


def describe(rows: torch.Tensor, head_dim: int, v_head_dim: int, block_n: int) -> tuple[TensorDescriptor, ...]:
    """Returns descriptors that load the parts of keys and of values, ``block_n`` tokens at a time.

    Args:
        rows: ``[tokens, kv_heads, head_dim + v_head_dim]``, contiguous.

    Raises:
        ValueError: a token's size is not a multiple of 16 bytes, or it does not begin at one.
    """
    flat = rows.flatten(1)
    if not in_pieces(flat):
        raise ValueError(f"copies {list(rows.shape)} of {rows.dtype} are not aligned to 16 bytes")
    widths = (*cut(head_dim), *cut(v_head_dim))
    made = (TensorDescriptor.from_tensor(flat, [block_n, width or 16]) for width in widths)
    return tuple(made)
