"""The tensors of a step that stay where they are, and the one way from a plan's rows to the model and to its logits inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.attention.backend import AttentionBackend, LayerCache, StepMetadata, distinct
from headrace.attention.context import ForwardContext, WantedTokens
from headrace.config import EngineConfig
from headrace.errors import EngineError
from headrace.kernels.inputs import LogitsInputs, RowTensors, StepInputs, fetch, logits_inputs, step_inputs
from headrace.kernels.transfer import upload
from headrace.models.interface import Model, ModelInputs, SelectiveModel
from headrace.runner.part import NO_EXTRAS, RunnerPart, StepExtras
from headrace.runner.slots import Bounds, RowArrays, SlotTables

PAD_SLOT = -1
PROMPT_ROWS = 16
"""Rows of a captured step that prompts may have, where it has any."""
_ALIGNED = 4
"""Numbers that arrays begin at a multiple of: 16 bytes, so that kernels are compiled once."""


class StepBuffers:
    """The rows of a step on their way to the device, and its outcome on the way back: one transfer each."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        scheduler = config.scheduler
        self.num_logits_rows = max(scheduler.max_num_seqs, *config.graph_rows, 0) * scheduler.decode_tokens
        """The most that a step may have."""
        # One place more than a captured step has, for a piece that runs along.
        self._most = self.num_logits_rows + PROMPT_ROWS + 1
        self.device = device
        size = 3 * _aligned(self._most + 1)
        self._rows = torch.zeros(size, dtype=torch.int32, device=device)
        self._sent = np.zeros(size, dtype=np.int32)
        """Content of ``_rows`` once the copies under way are done."""
        # A step's host buffers are free again once it has been collected, before the pipeline comes round to them.
        ring, pinned = scheduler.pipeline_depth + 1, device.type == "cuda"
        self._outbox = torch.zeros(ring, size, dtype=torch.int32, pin_memory=pinned)
        self._inbox = torch.zeros(ring, self._most, 2, dtype=torch.int32, pin_memory=pinned)
        self._turn = 0
        self._logits: LogitsInputs | None = None

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + sum(tensor.nbytes for tensor in self._logits or ())

    def logits(self, hidden: torch.Tensor | None = None) -> LogitsInputs:
        """Returns the inputs of the sampler. They are allocated for the first ``hidden [T, width]`` that they are to hold."""
        if self._logits is None:
            if hidden is None:
                raise EngineError("no step has run its model yet")
            count, device = self.num_logits_rows, self.device
            self._logits = LogitsInputs(
                hidden=torch.zeros(count, hidden.shape[1], dtype=hidden.dtype, device=device),
                slots=torch.full((count,), PAD_SLOT, dtype=torch.int64, device=device),
                positions=torch.zeros(count, dtype=torch.int64, device=device),
                outcome=torch.zeros(self._most, 2, dtype=torch.int32, device=device),
            )
        return self._logits

    def rows(self, count: int) -> RowTensors:
        """Returns the tensors of a step with ``count`` rows, views of one buffer."""
        pitch = _aligned(count + 1)
        slots, query_start, logits_start = self._rows[: 3 * pitch].view(3, pitch)
        return RowTensors(slots[:count], query_start[: count + 1], logits_start[: count + 1])

    def next_step(self) -> None:
        """Advances to the next host buffers. Call it before anything else of a step."""
        self._turn = (self._turn + 1) % len(self._inbox)

    def send(self, rows: RowArrays, decode_rows: int, num_rows: int, decode_tokens: int = 1) -> npt.NDArray[np.int64]:
        """Sends the rows, padded to ``decode_rows`` decode rows and ``num_rows`` in all, unless they are as they were.

        Args:
            decode_tokens: of a padding decode row.

        Returns:
            ``[R]``: row -> its place among those.
        """
        own = rows.num_decode_rows
        places = np.arange(len(rows))
        places[own:] += decode_rows - own
        pitch = _aligned(num_rows + 1)
        packed = np.zeros((3, pitch), dtype=np.int32)
        packed[0].fill(PAD_SLOT)
        packed[0, places] = rows.slots
        counts = np.zeros((2, num_rows), dtype=np.int32)
        counts[0, own:decode_rows] = decode_tokens
        counts[0, places] = rows.counts
        counts[1, places] = rows.num_logits
        np.cumsum(counts, axis=1, out=packed[1:, 1 : num_rows + 1])
        self._put(packed.reshape(-1))
        return places

    def query_start(self, count: int) -> npt.NDArray[np.int32]:
        """``RowTensors.query_start`` of the rows that have been sent, on the host."""
        pitch = _aligned(count + 1)
        return self._sent[pitch : pitch + count + 1]

    def clear(self, num_rows: int) -> None:
        """Marks every row of a step of ``num_rows`` rows as padding."""
        pitch = _aligned(num_rows + 1)
        for whole in (self._rows, self._sent):
            whole[:pitch] = PAD_SLOT
            whole[pitch : 3 * pitch] = 0

    def _put(self, packed: npt.NDArray[np.int32]) -> None:
        sent = self._sent[: len(packed)]
        if not np.array_equal(sent, packed):
            sent[:] = packed
            host = self._outbox[self._turn, : len(packed)]
            host.numpy()[:] = packed
            self._rows[: len(packed)].copy_(host, non_blocking=True)

    def fetch(self, count: int) -> torch.Tensor:
        """The first ``count`` of ``LogitsInputs.outcome``, on the host once the device has passed this place."""
        host = self._inbox[self._turn, :count]
        fetch(self.logits().outcome[:count], host)
        return host


class ForwardPass:
    """A step from the slots' tables to its logits inputs, kernel by kernel or while it is captured."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        backends: Sequence[AttentionBackend],
        tables: SlotTables,
        buffers: StepBuffers,
        parts: Sequence[RunnerPart] = (),
    ) -> None:
        self._model, self._caches, self._backends = model, caches, backends
        self._selective = model if isinstance(model, SelectiveModel) else None
        self._tables, self._buffers, self._parts = tables, buffers, parts
        self.to_plan = distinct(backends)

    def __call__(self, bounds: Bounds, extras: StepExtras = NO_EXTRAS, ends: RowArrays | None = None) -> torch.Tensor:
        """Runs the rows that have been sent.

        Args:
            ends: these rows; only states with logits are read of them. None: all states are.

        Returns:
            ``[T, hidden]``, or with ``ends`` of fewer tokens.
        """
        rows = self._buffers.rows(bounds.num_rows)
        given, ctx = self.begin(rows, bounds, extras)
        inputs = ModelInputs(given.ids, given.positions)
        for part in self._parts:
            inputs = part.adapt(inputs, rows, bounds, extras)
        if extras.inputs:
            inputs = dataclasses.replace(inputs, **extras.inputs)
        selective, wanted = self._selective, None
        if selective is not None and ends is not None and not extras.context and selective.selects(inputs, ctx):
            wanted = last_tokens(ctx.step, np.maximum(ends.num_logits, 1))
        if selective is not None and wanted is not None:
            hidden = selective.forward_wanted(inputs, ctx, wanted)
            rows = rows._replace(query_start=wanted.step.query_start)
            bounds = Bounds(bounds.num_rows, wanted.step.query_start_host, bounds.seq_lens)
        else:
            hidden = self._model(inputs, ctx)
        self.end(hidden, rows, bounds, given, self._buffers.logits(hidden))
        return hidden

    def begin(self, rows: RowTensors, bounds: Bounds, extras: StepExtras = NO_EXTRAS) -> tuple[StepInputs, ForwardContext]:
        """Gathers the inputs of the rows, and plans the attention backends for them."""
        tables = self._tables
        given = step_inputs(
            tables.token_ids.tensor,
            tables.num_computed,
            [table.tensor for table in tables.block_tables],
            rows.slots,
            rows.query_start,
            num_tokens=bounds.num_tokens,
            max_queries=bounds.max_queries,
            table_width=-(-int(bounds.seq_lens.max()) // tables.block_size),
            block_size=tables.block_size,
        )
        step = StepMetadata(
            num_decode_rows=bounds.num_decode_rows,
            query_start=rows.query_start,
            seq_lens=given.seq_lens,
            slot_mapping=given.slot_mapping,
            block_tables=given.block_tables,
            query_start_host=bounds.query_start,
            seq_lens_host=bounds.seq_lens,
            bounded=bounds.captured,
            longest=tables.block_tables[0].tensor.shape[1] * tables.block_size,
            **extras.metadata,
        )
        for backend in self.to_plan:
            backend.plan(step)
        context = {"backends": self._backends} | extras.context
        for part in self._parts:
            context |= part.context(rows, bounds, tables)
        return given, ForwardContext(step, self._caches, **context)

    def end(self, hidden: torch.Tensor, rows: RowTensors, bounds: Bounds, given: StepInputs, out: LogitsInputs) -> None:
        """Writes the logits inputs of the rows, and advances their slots."""
        logits_inputs(hidden, rows, given.seq_lens, self._tables.num_computed, out, single=bounds.single)


def last_tokens(step: StepMetadata, counts: npt.NDArray[np.int64]) -> WantedTokens | None:
    """The last ``counts [R]`` tokens of each row, which are so few that they attend as decode rows do; None: there are no
    others."""
    if counts.sum() == step.num_tokens:
        return None
    device, starts = step.query_start.device, np.concatenate(([0], np.cumsum(counts)))
    rows = np.repeat(np.arange(len(counts)), counts)
    tokens = (step.query_start_host[1:] - starts[1:])[rows] + np.arange(starts[-1])
    places, rows_device = upload(np.stack((tokens, rows)), device)
    part = dataclasses.replace(
        step,
        num_decode_rows=len(counts),
        query_start=upload(starts.astype(np.int32), device),
        query_start_host=starts,
        slot_mapping=tuple(slots[places] for slots in step.slot_mapping),
    )
    return WantedTokens(places, rows_device, part)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
