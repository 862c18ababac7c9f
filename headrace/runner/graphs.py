"""StepGraphs: CUDA graphs of the model and of the draw, captured apart.

Everything that changes from step to step is in tensors of fixed places: the slots' tables, which the step itself advances,
and three numbers a row that the host sends. So a captured step can be replayed for any sequences: the batch is padded to the
next captured size with padding rows (slot -1), which read and write nothing. The two meet in the logits inputs
(``StepBuffers.logits``), which a step that runs kernel by kernel fills and reads as well.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from headrace.attention.backend import ReplayLengths
from headrace.config import EngineConfig
from headrace.kernels import gpu
from headrace.models.capture import eager_reason, no_host_sync
from headrace.models.interface import Model
from headrace.runner.inputs import PROMPT_ROWS, Bounds, ForwardPass, StepBuffers
from headrace.runner.slots import RowArrays, SlotTables
from headrace.sampling.masks import HostMasks
from headrace.sampling.sampler import Sampler

_BESIDE = (0, 8, 32, 64, 128, 256)
"""Decode rows beside prompts: fewer sizes than without, since the shapes multiply."""


def rows_beside(graph_rows: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of the decode rows beside prompts, of those without."""
    most = graph_rows[-1]
    return (*(size for size in _BESIDE if size < most), most)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a captured run of the model has room for. Its decode rows come first, a token each, and then its prompts."""

    decode_rows: int
    prompt_tokens: int

    @property
    def rows(self) -> int:
        return self.decode_rows + (PROMPT_ROWS if self.prompt_tokens else 0)

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prompt_tokens


@dataclasses.dataclass(frozen=True)
class SampleShape:
    """What a captured draw has room for."""

    logits_rows: int
    filters: bool
    """Tokens are drawn from what top_k, top_p and min_p keep, where rows ask for it, which takes a dozen kernels more."""
    masked: bool = False
    """Rows may have token masks."""


AnyShape = TypeVar("AnyShape", Shape, SampleShape)


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph that can be launched."""

    replay: Callable[[], None]
    edition: int = 0
    """Of the backends, when it was captured."""


class GraphCount(NamedTuple):
    """How many CUDA graphs are captured and current, and how many there will be; equal: nothing is left to capture."""

    captured: int
    total: int
    failure: str = ""
    """Why a capture failed, after which no other is tried; empty: none did."""


class StepGraphs:
    """Captured graphs by their shapes. A step for which there is none runs kernel by kernel: nothing is captured on the way."""

    def __init__(
        self,
        model: Model,
        forward: ForwardPass,
        tables: SlotTables,
        buffers: StepBuffers,
        sampler: Sampler,
        config: EngineConfig,
    ) -> None:
        self._model, self._forward, self._sampler = model, forward, sampler
        self._tables, self._buffers = tables, buffers
        self._device = tables.device
        self._replanned = [backend for backend in forward.to_plan if backend.plans_replays]
        for backend in self._replanned:
            backend.reserve(self._device)
        self._max_len = config.scheduler.max_model_len
        self._decode_rows = config.graph_rows
        most = config.graph_rows[-1]
        self._beside = rows_beside(config.graph_rows)
        self._prompt_tokens = config.graph_prompt_tokens
        # Fewer sizes than of decode rows: a padding row costs the draw less than it costs the model.
        self._logits_rows = tuple(
            size for size in self._decode_rows if size <= 8 or size == most or size % (16 if size <= 64 else 32) == 0
        )
        # Which mask each logits row has, and the masks.
        self._words = -(-model.spec.vocab_size // 32)
        self._masks = torch.full((most * (1 + self._words),), -1, dtype=torch.int32, device=self._device)
        self._captured: dict[Shape | SampleShape, Captured] = {}
        self._num_shapes = sum(1 for _ in self.shapes())
        self._pool: Any = None
        """Memory that all graphs take their tensors from, one after the other."""
        self._stream: torch.cuda.Stream | None = None
        self.nbytes = 0
        """Bytes that the captured graphs keep on the device."""
        self._failure = ""
        """Why a capture failed; nothing is captured after that, and steps without a graph run kernel by kernel."""

    def shapes(self) -> Iterator[Shape | SampleShape]:
        """Every shape that may be captured, those that are wanted most first; the largest first among equals."""
        for rows in reversed(self._decode_rows):
            yield Shape(rows, 0)
            if rows in self._logits_rows:
                yield SampleShape(rows, filters=False)
        yield from (SampleShape(rows, filters=True) for rows in reversed(self._logits_rows))
        yield from (Shape(rows, tokens) for rows in self._beside for tokens in reversed(self._prompt_tokens))
        for filters in (False, True):
            yield from (SampleShape(rows, filters, masked=True) for rows in reversed(self._logits_rows))

    def shape_of(self, rows: RowArrays) -> Shape | None:
        """The smallest captured shape that has room for the rows; None: there is none.

        With prompts, only the smallest that there may be: the padding of a larger one costs more than it saves.
        """
        decode, own = rows.num_decode_rows, rows.counts
        if (own[:decode] != 1).any() or rows.num_logits_rows > len(rows.sampled):
            return None
        prompts, tokens = len(rows) - decode, int(own[decode:].sum())
        if not prompts:
            return self._first(Shape(size, 0) for size in _from(self._decode_rows, decode))
        beside, room = _from(self._beside, decode), _from(self._prompt_tokens, tokens)
        if prompts > PROMPT_ROWS or not beside or not room:
            return None
        return self._first([Shape(beside[0], room[0])])

    def sample_shape_of(self, rows: RowArrays, masks: HostMasks | None) -> SampleShape | None:
        """The smallest captured shape that draws all that the rows ask for; None: there is none."""
        slots = rows.slots[rows.sampled]
        if not len(slots) or rows.num_logits_rows != len(slots) or (masks is not None and masks.allows_nothing):
            return None
        if not self._sampler.plain(slots, None if masks is None else masks.which >= 0):
            return None
        filters, masked = self._sampler.filters(slots), masks is not None
        return self._first(SampleShape(size, filters, masked) for size in _from(self._logits_rows, len(slots)))

    def count(self) -> GraphCount:
        edition = self._edition
        current = sum(captured.edition == edition for captured in self._captured.values())
        return GraphCount(current, current if self._failure else self._num_shapes, self._failure)

    def _first(self, shapes: Iterable[AnyShape]) -> AnyShape | None:
        return next((shape for shape in shapes if shape in self._captured), None)

    def capture_next(self) -> GraphCount:
        """Captures the most useful graph that is missing or stale, if there is one and no capture has failed."""
        edition = self._edition
        current = {shape for shape, captured in self._captured.items() if captured.edition == edition}
        shape = next((shape for shape in self.shapes() if shape not in current), None)
        if shape is not None and not self._failure:
            try:
                self._captured[shape] = dataclasses.replace(self._capture(shape), edition=edition)
            except RuntimeError as error:
                # A model that waits for the GPU, or no memory left. Graphs that exist stay valid.
                self._failure = eager_reason(error, self._model)
        return self.count()

    def stop_capturing(self, reason: str) -> None:
        """Captures nothing more, as after a capture that failed."""
        self._failure = self._failure or reason

    def forward(self, shape: Shape, query_start: np.ndarray, places: np.ndarray, ends: np.ndarray) -> None:
        """Runs the model for the rows that have been sent as ``shape``.

        Args:
            query_start: ``[rows of the shape + 1]``, as it has been sent.
            places: ``[R]``: row -> its place in the shape.
            ends: ``[R]``: tokens of the row once the step is done.
        """
        if self._replanned:
            lengths = np.zeros(shape.rows, dtype=np.int64)
            lengths[places] = ends
            for backend in self._replanned:
                backend.prepare_replay(ReplayLengths(shape.decode_rows, shape.tokens, query_start.copy(), lengths))
        self._captured[shape].replay()

    def sample(self, shape: SampleShape, masks: HostMasks | None) -> None:
        """Draws from the logits inputs, and advances the slots."""
        if masks is not None:
            masks.copy_to(self._masks, self._logits_rows[-1])
        self._captured[shape].replay()

    @property
    def _edition(self) -> int:
        return sum(backend.graph_version for backend in self._replanned)

    def _capture(self, shape: Shape | SampleShape) -> Captured:
        """The first run compiles what is not compiled yet, which a capture must not. Its padding rows change nothing."""
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pad(shape)
        before = torch.cuda.memory_reserved(self._device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run(shape)
            if not self._captured:
                # A model that waits for the GPU raises here: a capture that fails halfway leaves CUDA's state broken.
                with no_host_sync():
                    self._run(shape)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            self._run(shape)
        self.nbytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return Captured(graph.replay)

    def _pad(self, shape: Shape | SampleShape) -> None:
        if isinstance(shape, Shape):
            self._buffers.clear(shape.rows)
        else:
            self._buffers.logits().slots.fill_(-1)
            self._masks[: self._logits_rows[-1]].fill_(-1)

    def _run(self, shape: Shape | SampleShape) -> None:
        """Everything that a replay does."""
        if isinstance(shape, SampleShape):
            self._draw(shape)
            return
        # The most that prompts may be: one row with all of their tokens.
        query_start = np.minimum(np.arange(shape.rows + 1), shape.decode_rows)
        query_start[shape.decode_rows + 1 :] = shape.tokens
        self._forward(Bounds(shape.decode_rows, query_start, np.full(shape.rows, self._max_len), captured=True))

    def _draw(self, shape: SampleShape) -> None:
        given, asked, tables = self._buffers.logits(), self._sampler.sampling_state, self._tables
        slots, positions = given.slots[: shape.logits_rows], given.positions[: shape.logits_rows]
        kernels = gpu.kernels("sample")
        logits = self._model.logits(given.hidden[: shape.logits_rows])
        if shape.masked:
            most = self._logits_rows[-1]
            gpu.kernels("mask").apply_masks(logits, self._masks[most:].view(most, -1), self._masks[: shape.logits_rows])
        kernels.sample(
            logits,
            asked.temperatures,
            asked.keys,
            positions,
            slots,
            asked.filters if shape.filters else None,
            kernels.SlotTokens(tables.token_ids.tensor, tables.num_tokens, given.outcome),
        )


def _from(sizes: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Those of the ascending sizes that are large enough."""
    return sizes[bisect.bisect_left(sizes, least) :]
