"""Pieces: runs prompts that must be computed in one piece a few layers a step, apart from the other rows of these steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from headrace.attention.sparse_rows import SparseRows
from headrace.core.plan import LayerRange, Row
from headrace.errors import EngineError
from headrace.kernels.inputs import LogitsInputs, RowTensors
from headrace.kernels.transfer import upload
from headrace.models.interface import HiddenStates, LayeredModel, Model, ModelInputs
from headrace.runner.inputs import ForwardPass, StepBuffers
from headrace.runner.part import RunnerPart, StepExtras, StepHandle
from headrace.runner.parts.sparse import SparseTables
from headrace.runner.slots import Bounds, RowArrays


@dataclasses.dataclass
class PausedPiece:
    """A piece between two of its steps."""

    row: Row
    """The piece's row in the last plan."""
    sparse: SparseRows
    states: HiddenStates
    num_layers: int = 0
    """Layers computed."""


class Pieces(RunnerPart):
    """Runs layers of pieces. At most one is paused; it is dropped with its slot.

    Args:
        model: must be a ``LayeredModel``.

    Raises:
        ValueError: it is none.
    """

    memory_label = "hidden states of a piece"

    def __init__(self, model: Model, forward: ForwardPass, buffers: StepBuffers, sparse: SparseTables) -> None:
        if not isinstance(model, LayeredModel):
            raise ValueError(f"{type(model).__name__} has routers and cannot pause between its layers")
        self._model, self._forward, self._buffers, self._tables = model, forward, buffers, sparse
        self._device = buffers.device
        self._paused: PausedPiece | None = None
        self._logits: LogitsInputs | None = None
        """Logits inputs of the piece, until they are copied behind those of the other rows."""

    @property
    def nbytes(self) -> int:
        """Bytes of the states that are held between two steps."""
        return 0 if self._paused is None else self._paused.states.nbytes

    def release(self, slots: Sequence[int]) -> None:
        """Drops the paused piece if its sequence has left."""
        if self._paused is not None and self._paused.row.slot in slots:
            self._paused = None

    def run(
        self, row: Row, rows: RowArrays, layers: LayerRange, step: StepHandle, place: int, logits_row: int
    ) -> torch.Tensor | None:
        """Computes layers of a piece.

        Args:
            rows: ``row`` alone.
            step: gets the results of its sparse attention.
            place: of the row in column 1 of ``LogitsInputs.outcome``.
            logits_row: of its last token, if it has one.

        Returns:
            ``[T, hidden]`` after the last layer; None: layers are left.

        Raises:
            EngineError: the layers are not those that come next.
        """
        sparse = self._sparse_rows(row, rows, layers)
        tensors, bounds = self._tensors(row), Bounds.of(rows)
        given, ctx = self._forward.begin(tensors, bounds, StepExtras(metadata={"sparse": sparse}))
        inputs = ModelInputs(given.ids, given.positions)
        if self._paused is None:
            self._paused = PausedPiece(row, sparse, self._model.first_states(inputs))
        piece = self._paused
        self._model.run_layers(piece.states, inputs, ctx, range(layers.first, layers.end))
        piece.num_layers = layers.end
        if not layers.last:
            self._flag(piece.states, place)
            return None
        self._paused = None
        step.sparse.append(self._tables.results(rows, sparse))
        hidden = self._model.last_states(piece.states)
        out = self._buffers.logits(hidden)
        if not place:
            # The only row of the step.
            self._forward.end(hidden, tensors, bounds, given, out)
            return hidden
        if self._logits is None:
            self._logits = LogitsInputs(*(torch.empty_like(tensor) for tensor in out))
        own = self._logits
        self._forward.end(hidden, tensors, bounds, given, own)
        out.outcome[place, 1] = own.outcome[0, 1]
        if row.num_logits:
            out.hidden[logits_row] = own.hidden[0]
            out.slots[logits_row] = own.slots[0]
            out.positions[logits_row] = own.positions[0]
        return hidden

    def _sparse_rows(self, row: Row, rows: RowArrays, layers: LayerRange) -> SparseRows:
        """Returns the sparse rows of the paused piece, which the layers must continue, or of a new one."""
        paused = self._paused
        if paused is None:
            sparse, done = self._tables.rows(rows), 0
            fine = sparse is not None and sparse.routed is not None
        else:
            sparse, done, before = paused.sparse, paused.num_layers, paused.row
            fine = (row.seq_id, row.num_computed, row.num_tokens) == (before.seq_id, before.num_computed, before.num_tokens)
        fine = fine and layers.total == self._tables.num_layers and done == layers.first < layers.end <= layers.total
        if sparse is None or not fine:
            where = "none is under way" if paused is None else f"{paused.row} is under way, up to layer {done}"
            raise EngineError(f"the plan has {layers} of a piece, {row}; {where}")
        return sparse

    def _tensors(self, row: Row) -> RowTensors:
        # Each begins at a multiple of 16 bytes, as kernels are compiled for.
        packed = np.array([[row.slot, 0], [0, row.num_tokens], [0, row.num_logits]], dtype=np.int32)
        slot, query_start, logits_start = upload(np.pad(packed, ((0, 0), (0, 2))), self._device)
        return RowTensors(slot[:1], query_start[:2], logits_start[:2])

    def _flag(self, states: HiddenStates, place: int) -> None:
        """Says of the row whether it is finite so far: its KV may be freed before it is complete."""
        total = states.x.sum(-1, dtype=torch.float32)
        if states.residual is not None:
            total += states.residual.sum(-1, dtype=torch.float32)
        self._buffers.logits(states.x).outcome[place, 1] = ~total.isfinite().all()


class NoPieces:
    """Stands for ``Pieces`` where the model has no routers: no prompt is computed by layers."""

    def run(
        self, row: Row, rows: RowArrays, layers: LayerRange, step: StepHandle, place: int, logits_row: int
    ) -> torch.Tensor | None:
        raise EngineError(f"step {step.step} has layers of a piece, and the model has no routers")
