"""DecodeGraphs: a decode step, from slots to drawn tokens, as one launch.

Everything that changes from step to step is in tensors of fixed places: the slots' tables, which the step itself advances,
and the rows' slots, the one thing that the host sends. So a captured step can be replayed for any sequences: a batch is
filled up to the next captured size with rows that are nobody's (slot -1), which read and write nothing.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from headrace.attention.backend import AttentionBackend, LayerCache, StepMetadata
from headrace.attention.context import ForwardContext
from headrace.config import EngineConfig
from headrace.kernels import gpu
from headrace.runner.clock import Stopwatch
from headrace.runner.model import Model
from headrace.runner.slots import Ints, SlotTables
from headrace.sampling.sampler import Sampler

NOBODY = -1


@dataclasses.dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outcome: torch.Tensor
    """``[rows]`` int64, written by each replay: the tokens drawn, -1 where the logits are not finite."""


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A replay under way."""

    tokens: torch.Tensor
    """``[R]`` int64 on the host, as ``_Captured.outcome``; to be read once ``done`` has passed."""
    done: torch.cuda.Event
    stopwatch: Stopwatch


class DecodeGraphs:
    """Steps whose rows each compute one token and draw the next, with nothing asked of the sampler but a temperature."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        backends: Sequence[AttentionBackend],
        tables: SlotTables,
        sampler: Sampler,
        config: EngineConfig,
    ) -> None:
        self._model, self._caches, self._backends = model, caches, backends
        self._to_plan = list({id(backend): backend for backend in backends}.values())
        self._tables, self._sampler = tables, sampler
        self._device = tables.device
        self._sizes = config.graph_rows
        self._max_len = config.scheduler.max_model_len
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        most = self.max_rows
        self._slots = torch.full((most,), NOBODY, dtype=torch.int64, device=self._device)
        """``[rows]`` int64: row -> slot."""
        self._sent: Ints = np.full(most, NOBODY, dtype=np.int64)
        """What ``_slots`` holds once the copies under way are done."""
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=self._device)
        # A step's host buffers are free again once it has been collected, before the pipeline comes round to them.
        ring = config.scheduler.pipeline_depth + 1
        self._outbox = torch.full((ring, most), NOBODY, dtype=torch.int64, pin_memory=True)
        self._inbox = torch.zeros(ring, most, dtype=torch.int64, pin_memory=True)
        self._turn = 0
        self.nbytes = 0
        """What the captured graphs keep on the device."""

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def capture(self, seconds: float, progress: Callable[[float, str], None]) -> int:
        """Captures every size, the largest first, as long as the time lasts. Returns how many there are now."""
        end = time.perf_counter() + seconds
        for number, size in enumerate(reversed(self._sizes)):
            if time.perf_counter() > end:
                break
            progress(number / len(self._sizes), f"{size} rows")
            self._get(size)
        return len(self._captured)

    def launch(self, slots: Ints) -> Replayed:
        """Starts a step of the rows' ``slots [R]``, at most ``max_rows`` of them."""
        count = len(slots)
        captured = self._get(self._sizes[bisect.bisect_left(self._sizes, count)])
        self._turn = (self._turn + 1) % len(self._inbox)
        stopwatch = Stopwatch(self._device)
        stopwatch.mark()
        self._send(slots, len(captured.outcome))
        captured.graph.replay()
        tokens = self._inbox[self._turn, :count].copy_(captured.outcome[:count], non_blocking=True)
        stopwatch.mark()
        return Replayed(tokens, stopwatch.last, stopwatch)

    def _send(self, slots: Ints, size: int) -> None:
        """The rows' slots, unless they are as they were."""
        count = len(slots)
        sent = self._sent[:size]
        if np.array_equal(sent[:count], slots) and (sent[count:] == NOBODY).all():
            return
        sent[:count] = slots
        sent[count:] = NOBODY
        host = self._outbox[self._turn, :size]
        host.numpy()[:] = sent
        self._slots[:size].copy_(host, non_blocking=True)

    def _get(self, size: int) -> _Captured:
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        return self._captured[size]

    def _capture(self, size: int) -> _Captured:
        """The first run compiles what is not compiled yet, which a capture must not; its rows are all nobody's."""
        self._slots.fill_(NOBODY)
        self._sent[:] = NOBODY
        before = torch.cuda.memory_reserved(self._device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(size)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outcome = self._step(size)
        self.nbytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return _Captured(graph, outcome)

    def _step(self, size: int) -> torch.Tensor:
        """A decode step of ``size`` rows; returns ``[size]`` int64 as ``_Captured.outcome``."""
        tables, slots = self._tables, self._slots[:size]
        given = gpu.kernels("inputs").step_inputs(
            tables.token_ids.tensor,
            tables.num_computed,
            [table.tensor for table in tables.block_tables],
            slots,
            self._starts[: size + 1],
            num_tokens=size,
            max_queries=1,
            table_width=tables.block_tables[0].width,
            block_size=tables.block_size,
        )
        step = StepMetadata(
            num_decode_rows=size,
            query_start=self._starts[: size + 1],
            seq_lens=given.seq_lens,
            positions=given.positions,
            slot_mapping=given.slot_mapping,
            block_tables=given.block_tables,
            query_start_host=np.arange(size + 1),
            seq_lens_host=np.full(size, self._max_len),
        )
        for backend in self._to_plan:
            backend.plan(step)
        hidden = self._model(given.ids, given.positions, ForwardContext(step, self._caches, self._backends))
        temperatures, keys = self._sampler.plain_state
        drawn = gpu.kernels("draw").draw(self._model.logits(hidden), temperatures, keys, given.seq_lens, slots)
        return gpu.kernels("inputs").advance(  # type: ignore[no-any-return]
            slots, given.seq_lens, drawn.tokens, drawn.best, tables.token_ids.tensor, tables.num_tokens, tables.num_computed
        )
