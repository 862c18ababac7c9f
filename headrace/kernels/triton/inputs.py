"""A step's inputs, gathered from the slots in one launch a cache group. Twin: ``headrace.kernels.inputs``."""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from headrace.kernels.inputs import StepInputs
from headrace.kernels.triton.pdl import begin, options

_BLOCK = 256
"""Tokens, or columns of a block table, of one program."""


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "table_width"], do_not_specialize_on_alignment=["slots", "query_start"]
)
def _gather(
    token_ids,  # [S, L] int32
    num_computed,  # [S] int64
    table,  # [S, B] int32
    slots,  # [R] int64
    query_start,  # [R + 1]
    ids,  # [T] int64
    positions,  # [T] int64
    seq_lens,  # [R] int32
    slot_mapping,  # [T] int64
    gathered,  # [R, table_width] int32
    num_rows,
    num_tokens,
    table_width,
    ids_slot: tl.int64,
    table_slot: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST_GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """A piece of one row's tokens and of its block table; row ``num_rows`` is what comes behind the last one."""
    begin(PDL)
    row = tl.program_id(0)
    piece = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(query_start + row).to(tl.int64)
    if row == num_rows:
        place = first + piece
        rest = place < num_tokens
        tl.store(slot_mapping + place, tl.full([BLOCK], -1, tl.int64), mask=rest)
        if FIRST_GROUP:
            tl.store(ids + place, tl.zeros([BLOCK], tl.int64), mask=rest)
            tl.store(positions + place, tl.zeros([BLOCK], tl.int64), mask=rest)
    else:
        count = tl.load(query_start + row + 1).to(tl.int64) - first
        slot = tl.load(slots + row)
        # Asked for each place: a block of answers can be a mask for others.
        held = slot + 0 * piece >= 0
        start = tl.load(num_computed + tl.maximum(slot, 0))
        inside = piece < count
        position = tl.where(held, start + piece, 0)
        known = inside & held
        block = tl.load(table + slot * table_slot + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        target = tl.where(block > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slot_mapping + first + piece, target, mask=inside)
        column = piece < table_width
        blocks = tl.load(table + slot * table_slot + piece, mask=column & held, other=0)
        tl.store(gathered + row.to(tl.int64) * table_width + piece, blocks, mask=column)
        if FIRST_GROUP:
            token = tl.load(token_ids + slot * ids_slot + position, mask=known, other=0).to(tl.int64)
            tl.store(ids + first + piece, token, mask=inside)
            tl.store(positions + first + piece, position, mask=inside)
            if tl.program_id(1) == 0:
                tl.store(seq_lens + row, tl.where(slot >= 0, start + count, 0).to(tl.int32))


def step_inputs(
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    tables: Sequence[torch.Tensor],
    slots: torch.Tensor,
    query_start: torch.Tensor,
    *,
    num_tokens: int,
    max_queries: int,
    table_width: int,
    block_size: int,
) -> StepInputs:
    """As its twin; nothing here waits for what the device holds."""
    rows, device = len(slots), slots.device
    ids, positions = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(2))
    seq_lens = torch.empty(rows, dtype=torch.int32, device=device)
    mapping = tuple(torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in tables)
    gathered = tuple(torch.empty(rows, table_width, dtype=torch.int32, device=device) for _ in tables)
    # What is behind the last row may be all there is.
    longest = max(max_queries, table_width, num_tokens, 1)
    for group, table in enumerate(tables):
        _gather[(rows + 1, triton.cdiv(longest, _BLOCK))](
            token_ids,
            num_computed,
            table,
            slots,
            query_start,
            ids,
            positions,
            seq_lens,
            mapping[group],
            gathered[group],
            rows,
            num_tokens,
            table_width,
            token_ids.stride(0),
            table.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK=_BLOCK,
            FIRST_GROUP=group == 0,
            num_warps=4,
            **options(device),
        )
    return StepInputs(ids, positions, seq_lens, mapping, gathered)


@triton.jit
def _advance(
    slots, draws, seq_lens, drawn, best, token_ids, num_tokens, num_computed, outcome, rows, ids_slot: tl.int64,
    BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = row < rows
    slot = tl.load(slots + row, mask=present, other=-1)
    held = slot >= 0
    length = tl.load(seq_lens + row, mask=present, other=0).to(tl.int64)
    token = tl.load(drawn + row, mask=present, other=0)
    highest = tl.load(best + row, mask=present, other=0.0)
    finite = (highest == highest) & (tl.abs(highest) != float("inf"))
    tl.store(outcome + row, tl.where(held & finite, token, -1), mask=present)
    drawing = held & (tl.load(draws + row, mask=present, other=0) != 0)
    tl.store(token_ids + slot * ids_slot + length, tl.where(finite, token, 0).to(tl.int32), mask=drawing)
    tl.store(num_tokens + slot, length + 1, mask=drawing)
    tl.store(num_computed + slot, length, mask=held)


def advance(
    slots: torch.Tensor,
    draws: torch.Tensor,
    seq_lens: torch.Tensor,
    drawn: torch.Tensor,
    best: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed: torch.Tensor,
) -> torch.Tensor:
    """As its twin, in one launch."""
    outcome = torch.empty(len(slots), dtype=torch.int64, device=slots.device)
    _advance[(triton.cdiv(len(slots), _BLOCK),)](
        slots, draws, seq_lens, drawn, best, token_ids, num_tokens, num_computed, outcome, len(slots), token_ids.stride(0),
        BLOCK=_BLOCK, **options(slots.device),
    )  # fmt: skip
    return outcome
