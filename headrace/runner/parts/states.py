"""StateTables: the state block of each slot, and the operations on blocks around a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.attention.backend import LayerCache, StepMetadata
from headrace.attention.context import StepStates
from headrace.cache.blocks import ArenaBlocks
from headrace.cache.states import state_views
from headrace.config import CacheConfig
from headrace.core.plan import StepPlan
from headrace.errors import EngineError
from headrace.kernels.inputs import RowTensors
from headrace.kernels.state import StateMetadata
from headrace.kernels.transfer import upload
from headrace.kv import StateOp
from headrace.model_spec import StateGroup
from headrace.runner.part import RunnerPart, StepHandle
from headrace.runner.slots import Bounds, RowArrays, SlotTables

NO_STATE = -1


def padding_states(cache: CacheConfig, caches: Sequence[LayerCache], step: StepMetadata) -> StepStates | None:
    """States of a step whose rows are all padding, for measuring it; None: the model has no state layers."""
    if cache.states is None:
        return None
    nowhere = torch.full((len(step.query_start) - 1,), -1, dtype=torch.int32, device=step.query_start.device)
    rows = StateMetadata(0, step.query_start, nowhere, torch.zeros_like(nowhere), int(step.query_start_host[-1]), padded=True)
    return StepStates(rows, state_views(ArenaBlocks(cache, caches).arena, cache.states))


class StateTables(RunnerPart):
    """Index space: slot, ``[S]``."""

    def __init__(
        self,
        cache: CacheConfig,
        states: StateGroup,
        blocks: ArenaBlocks,
        slots: int,
        device: torch.device,
        *,
        by_token: bool = False,
    ) -> None:
        """``by_token``: see ``StateMetadata``."""
        self._group, self._by_token = len(cache.groups), by_token
        self._blocks, self._device = blocks, device
        self.layers = state_views(blocks.arena, states)
        # The last entry is that of padding rows, whose slot is -1.
        self.of_slot = np.full(slots + 1, NO_STATE, dtype=np.int32)
        """``[S + 1]``: slot -> its state block."""
        self._table = torch.full((slots + 1,), NO_STATE, dtype=torch.int32, device=device)
        """``of_slot``, on the device at a place that captured steps know."""
        self._after: tuple[StateOp, ...] = ()

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def release(self, slots: Sequence[int]) -> None:
        self.of_slot[list(slots)] = NO_STATE

    def begin(self, plan: StepPlan) -> None:
        """Renames blocks that have moved, takes those of new sequences, and launches the operations before the rows."""
        moves = [(source, target) for group, source, target in plan.moves if group == self._group]
        for source, target in moves:
            self.of_slot[self.of_slot == source] = target
        for seq in plan.new:
            if not seq.state:
                raise EngineError(f"sequence {seq.seq_id} has no state block")
            self.of_slot[seq.slot] = seq.state
        if moves or plan.new:
            self._table.copy_(upload(self.of_slot.copy(), self._device))
        self._apply(plan.state_before)
        self._after = plan.state_after

    def context(self, rows: RowTensors, bounds: Bounds, tables: SlotTables) -> dict[str, Any]:
        slots = rows.slots.long()
        step = StateMetadata(
            decode_rows=bounds.num_decode_rows,
            query_start=rows.query_start,
            blocks=self._table[slots],
            starts=tables.num_computed[slots].to(torch.int32),
            num_tokens=bounds.num_tokens,
            padded=bounds.captured,
            by_token=self._by_token,
        )
        return {"states": StepStates(step, self.layers)}

    def end(self, rows: RowArrays, step: StepHandle) -> None:
        self._apply(self._after)

    def _apply(self, ops: Iterable[StateOp]) -> None:
        for op in ops:
            target = self._blocks.block(self._group, op.target)
            if op.kind == "zero":
                target.zero_()
            else:
                target.copy_(self._blocks.block(self._group, op.source))
