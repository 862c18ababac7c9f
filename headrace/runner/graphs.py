"""StepGraphs: a step as one launch, from slots to drawn tokens, or to logits where rows ask more of the sampler.

Everything that changes from step to step is in tensors of fixed places: the slots' tables, which the step itself advances,
and three numbers a row that the host sends. So a captured step can be replayed for any sequences: a batch is filled up to
the next captured shape with rows that are nobody's (slot -1), which read and write nothing.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.attention.backend import AttentionBackend, LayerCache, Lengths, Replanned, StepMetadata, distinct
from headrace.attention.context import ForwardContext
from headrace.config import EngineConfig
from headrace.errors import EngineError
from headrace.kernels import gpu
from headrace.runner.clock import Stopwatch
from headrace.runner.inputs import broken_rows
from headrace.runner.model import Model
from headrace.runner.slots import RowArrays, SlotTables
from headrace.sampling.sampler import Sampler

NOBODY = -1
PROMPT_ROWS = 16
"""Rows of a captured step that prompts may have, where it has any."""
_BESIDE = (0, 8, 32, 64, 128, 256)
"""Decode rows beside prompts: fewer sizes than without, since the shapes multiply."""
_ENDS = ((True, False), (True, True), (False, False))
"""How a captured step may end: whether it draws, and whether from what filters keep."""


class Shape(NamedTuple):
    """What a captured step has room for. Its decode rows come first, a token each, and then its prompts."""

    decode_rows: int
    prompt_tokens: int
    draws: bool = True
    """Tokens are drawn, at the rows' temperatures; else the step ends with logits."""
    filters: bool = False
    """And where rows ask for it of what top_k, top_p and min_p keep, which takes a dozen kernels more."""

    @property
    def rows(self) -> int:
        return self.decode_rows + (PROMPT_ROWS if self.prompt_tokens else 0)

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prompt_tokens


@dataclasses.dataclass(frozen=True)
class Captured:
    """A step that can be launched as a whole."""

    replay: Callable[[], None]
    outcome: torch.Tensor
    """``[rows]``, written by each replay. Int64: the tokens drawn, -1 where the logits are not finite; or of a shape that
    does not draw, bool: rows whose hidden states are not finite."""
    edition: int = 0
    """Of the backends, when it was captured."""


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A replay under way."""

    tokens: torch.Tensor
    """``[rows of the shape]`` int64 on the host, as ``Captured.outcome``; to be read once the stopwatch's last mark is past."""
    places: npt.NDArray[np.int64]
    """``[R]``: row -> where its token is."""
    stopwatch: Stopwatch


class StepGraphs:
    """Captured steps by their shapes."""

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
        self._to_plan = distinct(backends)
        self._replanned = [backend for backend in self._to_plan if isinstance(backend, Replanned)]
        self._tables, self._sampler = tables, sampler
        self._device = tables.device
        for backend in self._replanned:
            backend.reserve(self._device)
        self._decode_rows = config.graph_rows
        self._beside = tuple(sorted({*(size for size in _BESIDE if size < config.graph_rows[-1]), config.graph_rows[-1]}))
        self._prompt_tokens = config.graph_prompt_tokens
        self._max_len = config.scheduler.max_model_len
        self._captured: dict[Shape, Captured] = {}
        self._logits: torch.Tensor | None = None
        """``[rows, vocab]`` float32: where the shapes that do not draw leave theirs, one step after the other."""
        self._pool: Any = None
        """Memory that all captured steps take their tensors from, one after the other."""
        self._stream: torch.cuda.Stream | None = None
        most = config.graph_rows[-1] + PROMPT_ROWS
        self._given = torch.zeros(3, most + 1, dtype=torch.int32, device=self._device)
        """Row -> its slot; its first token in the packed batch (one more than rows); whether it draws."""
        self._sent = np.zeros((3, most + 1), dtype=np.int32)
        """What ``_given`` holds once the copies under way are done."""
        # A step's host buffers are free again once it has been collected, before the pipeline comes round to them.
        ring = config.scheduler.pipeline_depth + 1
        pinned = self._device.type == "cuda"
        self._outbox = torch.zeros(ring, 3, most + 1, dtype=torch.int32, pin_memory=pinned)
        self._inbox = torch.zeros(ring, most, dtype=torch.int64, pin_memory=pinned)
        self._turn = 0
        self.nbytes = 0
        """What the captured graphs keep on the device."""

    def shapes(self) -> Iterator[Shape]:
        """Every shape that may be captured, those that are wanted most first; the largest first among equals."""
        for end in _ENDS:
            yield from (Shape(rows, 0, *end) for rows in reversed(self._decode_rows))
        for end in _ENDS:
            yield from (Shape(rows, tokens, *end) for rows in self._beside for tokens in reversed(self._prompt_tokens))

    def shape_of(self, rows: RowArrays, *, draws: bool, filters: bool) -> Shape | None:
        """The smallest shape that has room for the rows; None: there is none."""
        end = draws, draws and filters
        decode = int(rows.decode.sum())
        prompts = len(rows) - decode
        if not prompts:
            place = bisect.bisect_left(self._decode_rows, decode)
            return Shape(self._decode_rows[place], 0, *end) if place < len(self._decode_rows) else None
        tokens = int(rows.counts[decode:].sum())
        beside, size = bisect.bisect_left(self._beside, decode), bisect.bisect_left(self._prompt_tokens, tokens)
        if prompts > PROMPT_ROWS or beside == len(self._beside) or size == len(self._prompt_tokens):
            return None
        return Shape(self._beside[beside], self._prompt_tokens[size], *end)

    def capture(self, seconds: float, progress: Callable[[float, str], None]) -> tuple[int, int]:
        """Captures shape after shape as long as the time lasts. Returns how many there are now, and how many there may be."""
        end = time.perf_counter() + seconds
        shapes = list(self.shapes())
        for number, shape in enumerate(shapes):
            if time.perf_counter() > end:
                break
            progress(number / len(shapes), f"{shape.decode_rows} rows, {shape.prompt_tokens} tokens of prompts")
            self._get(shape)
        return len(self._captured), len(shapes)

    def launch(self, shape: Shape, rows: RowArrays) -> Replayed:
        """Starts a step. Decode rows compute one token each."""
        captured = self._get(shape)
        stopwatch = Stopwatch(self._device)
        stopwatch.mark()
        places = self._send(shape, rows)
        captured.replay()
        tokens = self._inbox[self._turn, : shape.rows].copy_(captured.outcome, non_blocking=True)
        stopwatch.mark()
        return Replayed(tokens, places, stopwatch)

    def forward(self, shape: Shape, rows: RowArrays) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64]]:
        """Runs the model for rows of a shape that does not draw; the slots' counters stay as they are.

        Returns:
            logits ``[rows of the shape, vocab]`` float32, to be read before the next step overwrites them; ``[rows of the
            shape]`` bool: those whose hidden states are not finite; ``[R]``: row -> its place among those.
        """
        captured = self._get(shape)
        places = self._send(shape, rows)
        captured.replay()
        if self._logits is None:
            raise EngineError("a step without draws was captured without room for its logits")
        return self._logits[: shape.rows], captured.outcome, places

    def _send(self, shape: Shape, rows: RowArrays) -> npt.NDArray[np.int64]:
        """The rows, unless they are as they were; returns their places in the shape."""
        self._turn = (self._turn + 1) % len(self._inbox)
        decode = int(rows.decode.sum())
        places = np.arange(len(rows))
        places[decode:] += shape.decode_rows - decode
        given = np.zeros((3, shape.rows + 1), dtype=np.int32)
        given[0].fill(NOBODY)
        given[0, places] = rows.slots
        counts = np.zeros(shape.rows, dtype=np.int32)
        counts[: shape.decode_rows] = 1
        counts[places] = rows.counts
        np.cumsum(counts, out=given[1, 1:])
        given[2, places] = rows.samples
        self._replan(shape, given[1], places, rows.ends)
        sent = self._sent[:, : shape.rows + 1]
        if not np.array_equal(sent, given):
            sent[:] = given
            host = self._outbox[self._turn, :, : shape.rows + 1]
            host.numpy()[:] = given
            self._given[:, : shape.rows + 1].copy_(host, non_blocking=True)
        return places

    def _replan(self, shape: Shape, starts: np.ndarray, places: np.ndarray, ends: np.ndarray) -> None:
        """Has those backends plan that plan for captured steps, ``starts [rows + 1]`` being the first tokens."""
        if not self._replanned:
            return
        lengths = np.zeros(shape.rows, dtype=np.int64)
        lengths[places] = ends
        for backend in self._replanned:
            backend.replan(Lengths(shape.decode_rows, shape.tokens, starts, lengths))

    def _get(self, shape: Shape) -> Captured:
        captured, edition = self._captured.get(shape), sum(backend.edition for backend in self._replanned)
        if captured is None or captured.edition != edition:
            # Nobody's rows, which the first runs are of, change nothing.
            self._given[0].fill_(NOBODY)
            self._given[1:].zero_()
            self._sent[0].fill(NOBODY)
            self._sent[1:].fill(0)
            if not shape.draws and self._logits is None:
                most = len(self._given[0]) - 1
                self._logits = torch.zeros(most, self._model.spec.vocab_size, dtype=torch.float32, device=self._device)
            captured = self._captured[shape] = dataclasses.replace(self._capture(shape), edition=edition)
        return captured

    def _capture(self, shape: Shape) -> Captured:
        """The first run compiles what is not compiled yet, which a capture must not."""
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        before = torch.cuda.memory_reserved(self._device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(shape)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outcome = self._step(shape)
        self.nbytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return Captured(graph.replay, outcome)

    def _step(self, shape: Shape) -> torch.Tensor:
        """Everything that a replay does; returns ``[rows]`` as ``Captured.outcome``."""
        tables = self._tables
        slots, draws = self._given[0, : shape.rows], self._given[2, : shape.rows]
        starts = self._given[1, : shape.rows + 1]
        given = gpu.kernels("inputs").step_inputs(
            tables.token_ids.tensor,
            tables.num_computed,
            [table.tensor for table in tables.block_tables],
            slots,
            starts,
            num_tokens=shape.tokens,
            max_queries=max(shape.prompt_tokens, 1),
            table_width=tables.block_tables[0].width,
            block_size=tables.block_size,
        )
        # The most that prompts may be: one row with all of their tokens.
        bounds = np.minimum(np.arange(shape.rows + 1), shape.decode_rows)
        bounds[shape.decode_rows + 1 :] = shape.tokens
        step = StepMetadata(
            num_decode_rows=shape.decode_rows,
            query_start=starts,
            seq_lens=given.seq_lens,
            positions=given.positions,
            slot_mapping=given.slot_mapping,
            block_tables=given.block_tables,
            query_start_host=bounds,
            seq_lens_host=np.full(shape.rows, self._max_len),
            bounded=True,
        )
        for backend in self._to_plan:
            backend.plan(step)
        hidden = self._model(given.ids, given.positions, ForwardContext(step, self._caches, self._backends))
        broken = None
        if shape.prompt_tokens or not shape.draws:
            broken = broken_rows(hidden, starts, single=not shape.prompt_tokens)
        if shape.prompt_tokens:
            hidden = hidden.index_select(0, (starts[1:] - 1).clamp_(min=0))
        if not shape.draws and broken is not None and self._logits is not None:
            self._logits[: shape.rows].copy_(self._model.logits(hidden))
            return broken
        asked = self._sampler.draw_state
        filters = asked.filters if shape.filters else None
        logits = self._model.logits(hidden)
        drawn = gpu.kernels("draw").draw(logits, asked.temperatures, asked.keys, given.seq_lens, slots, filters)
        if broken is not None:
            drawn.best.masked_fill_(broken, torch.nan)
        return gpu.kernels("inputs").advance(  # type: ignore[no-any-return]
            slots,
            draws,
            given.seq_lens,
            drawn.tokens,
            drawn.best,
            tables.token_ids.tensor,
            tables.num_tokens,
            tables.num_computed,
        )
