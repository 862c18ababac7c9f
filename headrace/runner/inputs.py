"""From a plan's rows to the tensors of one step."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from headrace.attention.backend import StepMetadata
from headrace.runner.slots import RowArrays, SlotTables
from headrace.sampling.device import upload
from headrace.sampling.feature import Indices, Rows


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step: R rows, T tokens packed row after row, N rows that draw a token."""

    ids: torch.Tensor
    """``[T]`` int64"""
    positions: torch.Tensor
    """``[T]`` int64"""
    slots: torch.Tensor
    """``[R]`` int64: row -> slot."""
    ends: torch.Tensor
    """``[R]`` int64: tokens computed once the step is done."""
    drawing: Indices
    """``[N]``: which rows draw, ascending."""
    logit_rows: torch.Tensor
    """``[N]`` int64: where in the packed batch their last tokens are."""
    rows: Rows
    """The same rows as the sampler sees them."""
    step: StepMetadata


def build_batch(rows: RowArrays, tables: SlotTables) -> Batch:
    """Ids and positions come from the device's own tables: the last token drawn may not be known to the host yet.

    Call it after ``SlotTables.begin``.
    """
    query_start = np.concatenate(([0], np.cumsum(rows.counts)))
    drawing = np.flatnonzero(rows.samples)
    # One transfer for everything that the host knows.
    parts = (rows.slots, rows.counts, query_start, drawing, query_start[1:][drawing] - 1)
    sent = torch.split(upload(np.concatenate(parts), tables.device), [len(part) for part in parts])
    slots, counts, starts_in_batch, drawing_device, logit_rows = sent
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
    drawing_slots = slots[drawing_device]
    return Batch(
        ids=ids,
        positions=positions,
        slots=slots,
        ends=ends,
        drawing=drawing,
        logit_rows=logit_rows,
        rows=Rows(
            slots=rows.slots[drawing],
            num_outputs=rows.ends[drawing] - tables.prompt_len[rows.slots[drawing]],
            slots_device=drawing_slots,
            positions=tables.num_tokens[drawing_slots],
        ),
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
        mapping.append(torch.where(blocks > 0, blocks * size + offsets, -1))
    return tuple(mapping)


def _block_tables(tables: SlotTables, slots: torch.Tensor, longest: int) -> tuple[torch.Tensor, ...]:
    """Gathered by row, as wide as the longest row needs."""
    width = -(-longest // tables.block_size)
    return tuple(table.tensor[:, :width].index_select(0, slots) for table in tables.block_tables)


def broken_rows(hidden: torch.Tensor, query_start: torch.Tensor) -> torch.Tensor:
    """Which rows have a token whose hidden state is not finite.

    Chunks that draw nothing are looked at too: what they write must not be shared, or drawn from later.

    Args:
        hidden: ``[T, hidden]``
        query_start: ``[R + 1]``: row -> its first token.

    Returns:
        ``[R]`` bool
    """
    broken = ~hidden.sum(-1, dtype=torch.float32).isfinite()
    if len(broken) == len(query_start) - 1:
        return broken
    until = torch.nn.functional.pad(broken.cumsum(0), (1, 0))
    return until[query_start[1:]] > until[query_start[:-1]]
