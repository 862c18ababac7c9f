"""StateTables: the state block of each slot, and the operations on blocks around a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from headrace.attention.backend import LayerCache, StepMetadata
from headrace.attention.context import StepStates
from headrace.cache.blocks import ArenaBlocks
from headrace.cache.states import state_views
from headrace.config import CacheConfig
from headrace.core.plan import StepPlan
from headrace.errors import EngineError
from headrace.kernels.state import StateMetadata
from headrace.kernels.transfer import upload
from headrace.kv import StateOp
from headrace.model_spec import StateGroup
from headrace.runner.part import RunnerPart, StepExtras, StepHandle
from headrace.runner.slots import RowArrays


def padding_states(cache: CacheConfig, caches: Sequence[LayerCache], step: StepMetadata) -> StepStates | None:
    """States of a step whose rows are all padding, for measuring it; None: the model has no state layers."""
    if cache.states is None:
        return None
    starts = step.query_start_host.astype(np.int32)
    nowhere, zeros = np.full(len(starts) - 1, -1, dtype=np.int32), np.zeros(len(starts) - 1, dtype=np.int32)
    device = step.query_start.device
    rows = StateMetadata(
        decode_rows=0,
        query_start=step.query_start,
        blocks=upload(nowhere, device),
        starts=upload(zeros, device),
        query_start_host=starts,
        blocks_host=nowhere,
        starts_host=zeros,
    )
    return StepStates(rows, state_views(ArenaBlocks(cache, caches).arena, cache.states))


class StateTables(RunnerPart):
    """Index space: slot, ``[S]``."""

    def __init__(self, cache: CacheConfig, states: StateGroup, blocks: ArenaBlocks, slots: int, device: torch.device) -> None:
        self._group = len(cache.groups)
        self._blocks, self._device = blocks, device
        self.layers = state_views(blocks.arena, states)
        self.of_slot = np.zeros(slots, dtype=np.int32)
        """``[S]``: slot -> its state block; 0: none."""
        self._after: tuple[StateOp, ...] = ()

    def release(self, slots: Sequence[int]) -> None:
        self.of_slot[list(slots)] = 0

    def begin(self, plan: StepPlan) -> None:
        """Renames blocks that have moved, takes those of new sequences, and launches the operations before the rows."""
        for group, source, target in plan.moves:
            if group == self._group:
                self.of_slot[self.of_slot == source] = target
        for seq in plan.new:
            if not seq.state:
                raise EngineError(f"sequence {seq.seq_id} has no state block")
            self.of_slot[seq.slot] = seq.state
        self._apply(plan.state_before)
        self._after = plan.state_after

    def take(self, rows: RowArrays, extras: StepExtras) -> None:
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(rows.counts, out=query_start[1:])
        blocks, starts = self.of_slot[rows.slots], rows.starts.astype(np.int32)
        step = StateMetadata(
            decode_rows=rows.num_decode_rows,
            query_start=upload(query_start, self._device),
            blocks=upload(blocks, self._device),
            starts=upload(starts, self._device),
            query_start_host=query_start,
            blocks_host=blocks,
            starts_host=starts,
        )
        extras.context["states"] = StepStates(step, self.layers)

    def end(self, rows: RowArrays, step: StepHandle) -> None:
        self._apply(self._after)

    def _apply(self, ops: Iterable[StateOp]) -> None:
        for op in ops:
            target = self._blocks.block(self._group, op.target)
            if op.kind == "zero":
                target.zero_()
            else:
                target.copy_(self._blocks.block(self._group, op.source))
