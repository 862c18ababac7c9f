"""From rows of a step to its tokens: ids, positions, where their KV goes, and the rows' block tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """T tokens, packed row after row; R rows. All that no row owns, and rows without a slot, are as if empty."""

    ids: torch.Tensor
    """``[T]`` int64"""
    positions: torch.Tensor
    """``[T]`` int64"""
    seq_lens: torch.Tensor
    """``[R]`` int32: tokens of the row in the cache once this step's are written."""
    slot_mapping: tuple[torch.Tensor, ...]
    """Per cache group, ``[T]`` int64: ``block * block_size + offset``; -1 where the token has no block."""
    block_tables: tuple[torch.Tensor, ...]
    """Per cache group, ``[R, width]`` int32."""


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
    """Gathers a step's inputs from what is kept of each slot.

    Args:
        token_ids: ``[S, L]`` int32: the slots' tokens.
        num_computed: ``[S]`` int64: how many of them have been computed before this step.
        tables: per cache group, ``[S, B]`` int32: the slots' blocks; 0 where there is none.
        slots: ``[R]`` int: row -> slot; -1: nobody's, which fills up the batch of a captured graph.
        query_start: ``[R + 1]`` int: row -> its first token in the packed batch.
        num_tokens: T; where it is more than the rows have, the rest belongs to no row.
        max_queries: at least what any row has.
        table_width: columns of the block tables to gather, at least what the longest row needs.
    """
    rows = torch.repeat_interleave(query_start.diff().long())
    token = torch.arange(len(rows), device=slots.device)
    held = slots.clamp(min=0)
    start = torch.where(slots >= 0, num_computed[held], 0)
    positions = torch.where(slots[rows] >= 0, start[rows] + token - query_start[rows], 0)
    ids = torch.where(slots[rows] >= 0, token_ids[held[rows], positions], 0)
    mapping, gathered = [], []
    for table in tables:
        block = torch.where(slots[rows] >= 0, table[held[rows], positions // block_size], 0).long()
        mapping.append(torch.where(block > 0, block * block_size + positions % block_size, -1))
        gathered.append(torch.where((slots >= 0).unsqueeze(1), table[held, :table_width], 0))
    rest = num_tokens - len(rows)
    return StepInputs(
        ids=torch.nn.functional.pad(ids.long(), (0, rest)),
        positions=torch.nn.functional.pad(positions, (0, rest)),
        seq_lens=torch.where(slots >= 0, start + query_start.diff(), 0).int(),
        slot_mapping=tuple(torch.nn.functional.pad(slot, (0, rest), value=-1) for slot in mapping),
        block_tables=tuple(gathered),
    )


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
    """Takes note of what rows have computed and drawn; rows without a slot change nothing.

    Args:
        slots: ``[R]`` int: row -> slot; -1: nobody's.
        draws: ``[R]`` int: 0 for a row whose prompt is not complete, which only takes note of what it has computed.
        seq_lens: ``[R]`` int32: tokens computed with this step, behind which the drawn one goes.
        drawn: ``[R]`` int64
        best: ``[R]`` float32: the row's largest logit; where it is not finite, nothing was drawn, and token 0 stands in.
        token_ids: ``[S, L]`` int32, changed in place.
        num_tokens, num_computed: ``[S]`` int64, changed in place.

    Returns:
        ``[R]`` int64: the tokens drawn; -1 where there is none, or nothing finite to draw from.
    """
    finite = best.isfinite()
    for row in (slots >= 0).nonzero().flatten().tolist():
        slot, length = int(slots[row]), int(seq_lens[row])
        if draws[row]:
            token_ids[slot, length] = drawn[row] if finite[row] else 0
            num_tokens[slot] = length + 1
        num_computed[slot] = length
    return torch.where((slots >= 0) & finite, drawn, -1)
