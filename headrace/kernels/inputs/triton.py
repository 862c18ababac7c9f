"""A step's inputs, in one launch per cache group, and the sampler's inputs.

References: ``headrace.kernels.inputs.reference``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from headrace.kernels.inputs.reference import LogitsInputs, RowTensors, StepInputs
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_BLOCK = 256
"""Tokens, or columns of a block table, of one program."""
_WIDEST = 4096
"""Channels that a program holds at a time."""


@launched(do_not_specialize=["num_rows", "num_tokens", "table_width"], do_not_specialize_on_alignment=["slots", "query_start"])
def _gather(
    token_ids, num_computed, table, slots, query_start, ids, positions, seq_lens, slot_mapping, gathered, num_rows, num_tokens,
    table_width, ids_slot: tl.int64, table_slot: tl.int64, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    FIRST_GROUP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A piece of one row's tokens and of its block table; row ``num_rows`` holds the tokens of no row."""
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
        # A block instead of a scalar, so that it can mask other blocks.
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
    """Kernel version of ``headrace.kernels.inputs.step_inputs``; it does not wait for the device."""
    rows, device = len(slots), slots.device
    ids, positions = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(2))
    seq_lens = torch.empty(rows, dtype=torch.int32, device=device)
    mapping = tuple(torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in tables)
    gathered = tuple(torch.empty(rows, table_width, dtype=torch.int32, device=device) for _ in tables)
    # There may be only tokens of no row.
    longest = max(max_queries, table_width, num_tokens, 1)
    for group, table in enumerate(tables):
        _gather[(rows + 1, cdiv(longest, _BLOCK))](
            token_ids, num_computed, table, slots, query_start, ids, positions, seq_lens, mapping[group], gathered[group], rows,
            num_tokens, table_width, token_ids.stride(0), table.stride(0), BLOCK_SIZE=block_size, BLOCK=_BLOCK,
            FIRST_GROUP=group == 0, num_warps=4, **options(device),
        )  # fmt: skip
    return StepInputs(ids, positions, seq_lens, mapping, gathered)


@launched(do_not_specialize=["num_rows", "num_tokens"])
def _logits_inputs(
    hidden, slots, query_start, logits_start, seq_lens, num_computed, out_hidden, out_slots, out_positions, outcome, num_rows,
    num_tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LOGITS: tl.constexpr, LOGITS_P: tl.constexpr,
    SINGLE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One token; program ``num_tokens`` pads the logits rows that no row has. ``ROWS``: at least as many as there may be.

    ``SINGLE``: row i has token i alone. Otherwise flags are 0 before, and are set where a token is broken.
    """
    begin(PDL)
    token = tl.program_id(0)
    if token == num_tokens:
        rest = tl.arange(0, LOGITS_P)
        used = tl.load(logits_start + num_rows)
        tl.store(out_slots + rest, tl.full([LOGITS_P], -1, tl.int64), mask=(rest >= used) & (rest < LOGITS))
    else:
        row = token
        if not SINGLE:
            each = tl.arange(0, ROWS)
            ends = tl.load(query_start + 1 + each, mask=each < num_rows, other=2147483647)
            row = tl.sum((ends <= token).to(tl.int32), 0)
        if row < num_rows:
            slot = tl.load(slots + row).to(tl.int64)
            behind = tl.load(query_start + row + 1) - token - 1
            place = tl.load(logits_start + row + 1) - behind - 1
            start = tl.load(logits_start + row)
            wanted = place >= start
            channel = tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], tl.float32)
            for first in range(0, WIDTH, BLOCK):
                inside = first + channel < WIDTH
                value = tl.load(hidden + token.to(tl.int64) * WIDTH + first + channel, mask=inside, other=0.0)
                total += value.to(tl.float32)
                target = out_hidden + place.to(tl.int64) * WIDTH + first + channel
                tl.store(target, value, mask=inside & (channel * 0 + place >= start))
            whole = tl.sum(total, 0)
            broken = ((whole != whole) | (tl.abs(whole) == float("inf"))).to(tl.int32)
            if SINGLE:
                tl.store(outcome + 2 * row + 1, broken)
            else:
                tl.store(outcome + 2 * row + 1, broken, mask=broken > 0)
            length = tl.load(seq_lens + row).to(tl.int64)
            tl.store(out_slots + place, slot, mask=wanted)
            tl.store(out_positions + place, length - behind, mask=wanted)
            tl.store(num_computed + slot, length, mask=(behind == 0) & (slot >= 0))


def logits_inputs(
    hidden: torch.Tensor,
    rows: RowTensors,
    seq_lens: torch.Tensor,
    num_computed: torch.Tensor,
    out: LogitsInputs,
    *,
    single: bool,
) -> None:
    """Kernel version of ``headrace.kernels.inputs.logits_inputs``, in one launch, or two where rows have several tokens."""
    tokens, width = hidden.shape
    count, most = len(rows.slots), len(out.slots)
    if not single:
        out.outcome[:count, 1].zero_()
    _logits_inputs[(tokens + 1,)](
        hidden.contiguous(), rows.slots, rows.query_start, rows.logits_start, seq_lens, num_computed, out.hidden, out.slots,
        out.positions, out.outcome, count, tokens,
        WIDTH=width, BLOCK=min(power_of_two(width), _WIDEST), ROWS=power_of_two(len(out.outcome)),
        LOGITS=most, LOGITS_P=power_of_two(most), SINGLE=single, num_warps=4, **options(hidden.device),
    )  # fmt: skip


@launched(do_not_specialize=["count"], do_not_specialize_on_alignment=["host"])
def _fetch(outcome, host, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(host + place, tl.load(outcome + place, mask=place < count, other=0), mask=place < count)


def fetch(outcome: torch.Tensor, host: torch.Tensor) -> None:
    """Kernel version of ``headrace.kernels.inputs.fetch``: the next kernels start sooner behind it than behind a copy."""
    count = outcome.numel()
    _fetch[(cdiv(count, _BLOCK),)](outcome, host, count, BLOCK=_BLOCK, num_warps=4, **options(outcome.device))
