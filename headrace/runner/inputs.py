"""From a plan's rows to the tensors of one step."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from headrace.attention.backend import StepMetadata
from headrace.kernels.transfer import upload
from headrace.runner.slots import RowArrays, SlotTables
from headrace.sampling.feature import Indices, Rows


@dataclasses.dataclass(frozen=True)
class Ending:
    """What the end of a step takes: R rows, N of which draw a token."""

    slots: torch.Tensor
    """``[R]`` int64: row -> slot."""
    ends: torch.Tensor
    """``[R]`` int64: tokens computed once the step is done."""
    drawing: Indices
    """``[N]``: which rows draw, ascending."""
    last: torch.Tensor
    """``[R]`` int64: row -> where what the model made of its last token is."""
    last_drawing: torch.Tensor
    """``[N]`` int64: the same, of the rows that draw."""
    rows: Rows
    """Those rows as the sampler sees them."""


def build_ending(rows: RowArrays, tables: SlotTables, last: Indices) -> Ending:
    """``last [R]``: as ``Ending.last``. Call it after ``SlotTables.begin``."""
    drawing = np.flatnonzero(rows.samples)
    parts = (rows.slots, rows.ends, last, last[drawing], rows.slots[drawing])
    sent = torch.split(upload(np.concatenate(parts), tables.device), [len(part) for part in parts])
    return Ending(
        slots=sent[0],
        ends=sent[1],
        drawing=drawing,
        last=sent[2],
        last_drawing=sent[3],
        rows=Rows(
            slots=rows.slots[drawing],
            num_outputs=rows.ends[drawing] - tables.prompt_len[rows.slots[drawing]],
            slots_device=sent[4],
            positions=tables.num_tokens[sent[4]],
        ),
    )


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step: R rows, T tokens packed row after row."""

    ids: torch.Tensor
    """``[T]`` int64"""
    positions: torch.Tensor
    """``[T]`` int64"""
    step: StepMetadata


def build_batch(rows: RowArrays, tables: SlotTables) -> Batch:
    """Ids and positions come from the device's own tables: the last token drawn may not be known to the host yet.

    Call it after ``SlotTables.begin``.
    """
    query_start = np.concatenate(([0], np.cumsum(rows.counts)))
    # One transfer for everything that the host knows.
    parts = (rows.slots, rows.counts, query_start)
    slots, counts, starts_in_batch = torch.split(upload(np.concatenate(parts), tables.device), [len(part) for part in parts])
    num_tokens = int(query_start[-1])
    starts = tables.num_computed[slots]
    ends = starts + counts
    if num_tokens == len(rows):
        positions, token_slots = starts, slots
    else:
        row_of = torch.arange(len(rows), device=tables.device).repeat_interleave(counts, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=tables.device) + (starts - starts_in_batch[:-1])[row_of]
        token_slots = slots[row_of]
    ids = tables.token_ids.tensor.view(-1)[token_slots * tables.token_ids.width + positions].long()
    return Batch(
        ids=ids,
        positions=positions,
        step=StepMetadata(
            num_decode_rows=int(rows.decode.sum()),
            query_start=starts_in_batch.int(),
            seq_lens=ends.int(),
            positions=positions,
            slot_mapping=_slot_mapping(tables, token_slots, positions),
            block_tables=_block_tables(tables, slots, int(rows.ends.max())),
            query_start_host=query_start,
            seq_lens_host=rows.ends,
        ),
    )


def _slot_mapping(tables: SlotTables, token_slots: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where each token's KV goes; nowhere (-1) if its block is the null block, which nobody may write."""
    size = tables.block_size
    numbers, offsets = positions // size, positions % size
    mapping = []
    for table in tables.block_tables:
        blocks = table.tensor.view(-1)[token_slots * table.width + numbers].long()
        mapping.append((blocks * size + offsets).masked_fill_(blocks <= 0, -1))
    return tuple(mapping)


def _block_tables(tables: SlotTables, slots: torch.Tensor, longest: int) -> tuple[torch.Tensor, ...]:
    """Gathered by row, as wide as the longest row needs."""
    width = -(-longest // tables.block_size)
    return tuple(table.tensor[:, :width].index_select(0, slots) for table in tables.block_tables)


def broken_rows(hidden: torch.Tensor, query_start: torch.Tensor, *, single: bool) -> torch.Tensor:
    """Which rows have a token whose hidden state is not finite.

    Chunks that draw nothing are looked at too: what they write must not be shared, or drawn from later.

    Args:
        hidden: ``[T, hidden]``
        query_start: ``[R + 1]``: row -> its first token.
        single: every row has one token, and there are no others.

    Returns:
        ``[R]`` bool
    """
    broken = ~hidden.sum(-1, dtype=torch.float32).isfinite()
    if single:
        return broken
    until = torch.nn.functional.pad(broken.cumsum(0), (1, 0))
    return until[query_start[1:]] > until[query_start[:-1]]
