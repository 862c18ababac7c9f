"""The ends of a step: from rows to the model's inputs, and from hidden states to the sampler's inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch


class RowTensors(NamedTuple):
    """R rows on the device, whose tokens are packed row after row; views of persistent int32 tensors."""

    slots: torch.Tensor
    """``[R]``: row -> slot; -1: a padding row, which reads and writes nothing."""
    query_start: torch.Tensor
    """``[R + 1]``: row -> its first token in the packed batch."""
    logits_start: torch.Tensor
    """``[R + 1]``: row -> its first logits row; a row's logits rows are those of its last tokens."""


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """T tokens, packed row after row; R rows. Tokens of no row, and of padding rows, are as if empty."""

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


class LogitsInputs(NamedTuple):
    """The sampler's inputs, in persistent tensors. Index space: logits row, ``[L]``, except ``outcome``."""

    hidden: torch.Tensor
    """``[L, hidden]``: hidden state of the logits row's token."""
    slots: torch.Tensor
    """``[L]`` int64; -1: a padding row."""
    positions: torch.Tensor
    """``[L]`` int64: position of the sampled token in its sequence."""
    outcome: torch.Tensor
    """``[max(L, R), 2]`` int32. Column 0, by logits row: the sampled token, or minus the fault that prevented sampling.
    Column 1, by row: 1 if one of its hidden states is not finite."""


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
    """Gathers a step's inputs from the slots' state.

    Args:
        token_ids: ``[S, L]`` int32: the slots' tokens.
        num_computed: ``[S]`` int64: how many of them have been computed before this step.
        tables: per cache group, ``[S, B]`` int32: the slots' blocks; 0 where there is none.
        slots, query_start: as ``RowTensors``.
        num_tokens: T; where it is more than the rows have, the rest belongs to no row.
        max_queries: at least what any row has; 1 where T is R: each row has one token.
        table_width: columns of the block tables to gather, at least what the longest row needs.
    """
    vacant = slots < 0
    occupied = slots.long().clamp_(min=0)
    starts, counts = num_computed[occupied], query_start.diff().long()
    if num_tokens == len(slots) and max_queries == 1:
        # One token per row.
        positions, token_slots, unused = starts, occupied, vacant
    else:
        # Tokens of no row are those of one more padding row.
        ends = torch.nn.functional.pad(query_start[1:], (0, 1), value=num_tokens)
        row = torch.searchsorted(ends, torch.arange(num_tokens, dtype=ends.dtype, device=ends.device), right=True)
        first = torch.nn.functional.pad(starts - query_start[:-1], (0, 1))
        positions = torch.arange(num_tokens, device=row.device) + first[row]
        token_slots = torch.nn.functional.pad(occupied, (0, 1))[row]
        unused = torch.nn.functional.pad(vacant, (0, 1), value=True)[row]
    positions = positions.masked_fill(unused, 0)
    numbers, offsets = positions // block_size, positions % block_size
    mapping, gathered = [], []
    for table in tables:
        blocks = table.view(-1)[token_slots * table.shape[1] + numbers].long()
        mapping.append((blocks * block_size + offsets).masked_fill_((blocks <= 0) | unused, -1))
        gathered.append(table[:, :table_width].index_select(0, occupied).masked_fill_(vacant.unsqueeze(1), 0))
    ids = token_ids.view(-1)[token_slots * token_ids.shape[1] + positions].long()
    return StepInputs(
        ids=ids.masked_fill_(unused, 0),
        positions=positions,
        seq_lens=(starts + counts).masked_fill_(vacant, 0).int(),
        slot_mapping=tuple(mapping),
        block_tables=tuple(gathered),
    )


def logits_inputs(
    hidden: torch.Tensor,
    rows: RowTensors,
    seq_lens: torch.Tensor,
    num_computed: torch.Tensor,
    out: LogitsInputs,
    *,
    single: bool,
) -> None:
    """Gathers the hidden states that get logits, flags rows with non-finite states, and updates ``num_computed``.

    Padding rows change nothing.

    Args:
        hidden: ``[T, hidden]``, contiguous.
        seq_lens: ``[R]`` int32: tokens of the row in the cache now.
        num_computed: ``[S]`` int64, changed in place.
        out: changed in place: logits rows beyond those of the rows are padding; column 1 of ``outcome`` for all rows that
            have tokens.
        single: each row has one token, and there are no others.
    """
    slots, count = rows.slots, int(rows.logits_start[-1])
    if single and count == len(slots):
        # Row, token and logits row are one.
        out.hidden[:count] = hidden
        out.slots[:count] = slots
        out.positions[:count] = seq_lens
    else:
        row = torch.repeat_interleave(rows.logits_start.diff(), output_size=count)
        # How many tokens of its row come behind the logits row's own.
        behind = rows.logits_start[1:][row] - 1 - torch.arange(count, device=row.device)
        torch.index_select(hidden, 0, rows.query_start[1:][row] - 1 - behind, out=out.hidden[:count])
        out.slots[:count] = slots[row]
        out.positions[:count] = seq_lens[row] - behind
    out.slots[count:] = -1
    broken = ~hidden.sum(-1, dtype=torch.float32).isfinite()
    if not single:
        # Chunks without logits rows count too: their KV must not be shared, nor sampled from later.
        until = torch.nn.functional.pad(broken.cumsum(0), (1, 0))
        broken = until[rows.query_start[1:].long()] > until[rows.query_start[:-1].long()]
    out.outcome[: len(slots), 1] = broken
    occupied = (slots >= 0).nonzero().squeeze(1)
    num_computed[slots[occupied]] = seq_lens[occupied].long()


def fetch(outcome: torch.Tensor, host: torch.Tensor) -> None:
    """Copies ``[R, 2]`` int32, contiguous, to the host, which does not wait for it: ``host`` is pinned if there is a GPU."""
    host.copy_(outcome, non_blocking=True)
