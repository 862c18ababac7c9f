"""Sums over ranks in memory that the ranks' GPUs map, with the residual sum and RMS norm that follow.

One kernel a rank: it writes its part into its place in the memory of every rank, reads all parts from its own, and adds them
in float32 in the order of the ranks, so all ranks get the same bits, whatever the number of rows. A word of no part, a NaN
that arithmetic does not make, says that the word has not arrived: no flag has to be ordered behind the data, and none waits
for NVLink's acknowledgements. This is the low-latency protocol of NCCL ("Demystifying NCCL", arXiv 2507.04786) with
TensorRT-LLM's sentinel in place of a flag beside each word.

A row has two places, used in turns. A program empties the one that it has read. A peer writes there again two sums later,
which it begins after a whole kernel in between, which waits for what this rank sends after it has emptied the place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from headrace.kernels.norm import ResidualNorm
from headrace.kernels.norm.triton import normed
from headrace.kernels.support import power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, options, wait

ROWS = 256
"""Each is a program's, and all of them must run at once: a program waits for its peers'."""
ROW_BYTES = 16 << 10
EMPTY_BYTE = 255
TURNS = 2
_EMPTY: tl.constexpr = tl.constexpr(-1)
_ROWS: tl.constexpr = tl.constexpr(ROWS)


@dataclasses.dataclass(frozen=True)
class PeerBuffers:
    """A rank's view of the ranks' memory."""

    rank: int
    ranks: Sequence[torch.Tensor]
    """Memory of each rank, ``nbytes(size)`` bytes, uint8, each ``EMPTY_BYTE`` before any rank's first sum."""
    turns: torch.Tensor
    """``[ROWS]`` int32, zeros at first: which place of a row is next."""
    failed: torch.Tensor
    """``[1]`` int32: not 0 once a kernel has waited in vain. Results are NaN from then on, and nothing waits any more."""
    alarm: torch.Tensor
    """The same for the host, in memory that both reach."""


def nbytes(size: int) -> int:
    """Returns the bytes that each of ``size`` ranks shares with the others."""
    return TURNS * size * ROWS * ROW_BYTES


@triton.jit
def push(x, peers, turn, rank, row, channel, mask, WIDTH: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr):
    """Writes a row of x into the rank's place in the memory of every rank."""
    value = tl.load(x + row.to(tl.int64) * WIDTH + channel, mask=mask, other=0.0)
    word = value.to(peers[0].dtype.element_ty, bitcast=True)
    # A NaN of these very bits becomes another one.
    nan = 0x7FFF if word.dtype == tl.int16 else 0x7FFFFFFF
    word = tl.where(word == _EMPTY, nan, word)
    place = ((turn * SIZE + rank) * _ROWS + row).to(tl.int64) * ROOM + channel
    for peer in tl.static_range(SIZE):
        tl.store(peers[peer] + place, word, mask=mask)


@triton.jit
def pull(own, turn, row, channel, mask, tries, DTYPE: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr):
    """Waits for the row of every rank, empties the places, and returns the sum and whether any word is still missing."""
    place = (turn * SIZE * _ROWS + row).to(tl.int64) * ROOM + channel
    total = tl.zeros(channel.shape, tl.float32)
    missing = 1
    tried = 0
    while (missing != 0) & (tried <= tries):
        empty = tl.zeros(channel.shape, tl.int32)
        for rank in tl.static_range(SIZE):
            word = tl.load(own + place + rank * _ROWS * ROOM, mask=mask, other=0, volatile=True)
            empty |= (word == _EMPTY).to(tl.int32)
            part = word.to(DTYPE, bitcast=True).to(tl.float32)
            if rank == 0:
                total = part
            else:
                total += part
        missing = tl.max(empty, 0)
        tried += 1
    for rank in tl.static_range(SIZE):
        tl.store(own + place + rank * _ROWS * ROOM, tl.full(channel.shape, _EMPTY, own.dtype.element_ty), mask=mask)
    return total, missing


@launched(do_not_specialize=["rank", "tries"])
def _peer_sum(
    x, residual, first, weight, out, total, peers, own, turns, failed, alarm, rank, tries, first_eps, eps, WIDTH: tl.constexpr,
    WIDTH_P: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row of ``WIDTH`` channels.

    With NORM, the sum over ranks, normed by the weight ``first`` if there is FIRST, is added to the residual, and the result
    normed. Each step is rounded as it is in kernels of its own.
    """
    announce(PDL)
    row = tl.program_id(0)
    channel = tl.arange(0, WIDTH_P)
    mask = channel < WIDTH
    if NORM:
        factor = tl.load(weight + channel, mask=mask, other=0.0)
    if FIRST:
        first_factor = tl.load(first + channel, mask=mask, other=0.0)
    wait(PDL)
    place = row.to(tl.int64) * WIDTH + channel
    turn = tl.load(turns + row)
    push(x, peers, turn, rank, row, channel, mask, WIDTH, ROOM, SIZE)
    if NORM:
        added = tl.load(residual + place, mask=mask, other=0.0)
    tries = tl.where(tl.load(failed) != 0, 0, tries)
    wide, missing = pull(own, turn, row, channel, mask, tries, x.dtype.element_ty, ROOM, SIZE)
    tl.store(turns + row, 1 - turn)
    if missing != 0:
        tl.store(failed, 1)
        tl.store(alarm, 1)
    value = wide.to(x.dtype.element_ty)
    if FIRST:
        value = normed(value, first_factor, first_eps, WIDTH, OFFSET)
    if NORM:
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(total + place, value, mask=mask)
        value = normed(value, factor, eps, WIDTH, OFFSET)
    tl.store(out + place, value, mask=mask)


def peer_sum(x: torch.Tensor, buffers: PeerBuffers, tries: int) -> torch.Tensor:
    """The sum of the ranks' ``x``: contiguous, ``[T, n]``, bfloat16 or float32, at most ``ROWS`` of at most ``ROW_BYTES``.

    Args:
        tries: how often each program looks for what it waits for before it gives up; about a microsecond each.
    """
    out = torch.empty_like(x)
    _launch(x, x, None, out, out, buffers, tries)
    return out


def peer_sum_norm(
    x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, buffers: PeerBuffers, tries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm.add`` of the sum of the ranks' ``x`` and the residual, of the same shape and dtype, contiguous too."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, norm, out, total, buffers, tries)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: ResidualNorm | None,
    out: torch.Tensor,
    total: torch.Tensor,
    buffers: PeerBuffers,
    tries: int,
) -> None:
    rows, width = x.shape
    if rows > ROWS or width * x.itemsize > ROW_BYTES:
        raise ValueError(f"x is {list(x.shape)}; it must have at most {ROWS} rows of at most {ROW_BYTES} bytes")
    words = torch.int16 if x.itemsize == 2 else torch.int32
    views = tuple(part.view(words) for part in buffers.ranks)
    own, width_p = norm or ResidualNorm(x, 0.0), power_of_two(width)
    # Eight channels a thread, as in the norm's own kernel.
    warps = min(max(width_p // 256, 1), 16)
    _peer_sum[(rows,)](
        x, residual, x if own.first is None else own.first, own.weight, out, total, views, views[buffers.rank], buffers.turns,
        buffers.failed, buffers.alarm, buffers.rank, tries, own.first_eps, own.eps, WIDTH=width, WIDTH_P=width_p,
        ROOM=ROW_BYTES // x.itemsize, SIZE=len(views), FIRST=own.first is not None, NORM=norm is not None, OFFSET=own.offset,
        num_warps=warps, **options(x.device),
    )  # fmt: skip
