"""StepGraphs: CUDA graphs of the model and of sampling, captured apart.

Everything that changes from step to step is in tensors of fixed places: the slots' tables, which the step itself advances,
and three numbers a row that the host sends. So a captured step can be replayed for any sequences: the batch is padded to the
next captured size with padding rows (slot -1), which read and write nothing. The two meet in the logits inputs
(``StepBuffers.logits``), which a step that runs kernel by kernel fills and reads as well.

A step whose graph is missing replays a larger one. Where there is none, it launches the kernels of the missing graph one by
one, which compiles what is not compiled; the next step of that shape captures the graph in place of launching them, which
takes the host no longer. Which steps capture depends only on the steps, so that ranks agree and recorded steps replay.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from headrace.attention.backend import ReplayLengths
from headrace.config import EngineConfig
from headrace.core.plan import GraphCount
from headrace.errors import EngineError
from headrace.kernels import sampling
from headrace.kernels.lora import Segment
from headrace.models.capture import eager_reason, no_host_sync
from headrace.models.interface import Model
from headrace.runner.inputs import PROMPT_ROWS, ForwardPass, StepBuffers
from headrace.runner.part import NO_EXTRAS, StepExtras
from headrace.runner.slots import Bounds, RowArrays, SlotTables
from headrace.sampling.masks import HostMasks
from headrace.sampling.sampler import Sampler

STAND_INS = 64
"""Steps that replay a larger graph than they need, after which one of them captures its own: running and capturing 28 layers
takes the host some 25 ms each, and 64 steps of the smallest models 100 to 200 ms."""
KINDS = 4
"""Kinds of shapes: only decode rows or prompts too, logits rows with filters or without. The largest of each are the first
of ``shapes``."""
_BESIDE = (0, 8, 32, 64, 128, 256)
"""Decode rows of steps with prompts: fewer sizes than of other steps, since the shapes multiply."""
_MOST_LOGITS = 1 << 28
"""Logits of a graph, at most: they are float32, and graphs keep their memory, 1 GiB."""


def rows_beside(graph_rows: tuple[int, ...]) -> tuple[int, ...]:
    """Selects, of these sizes of decode rows, those for steps with prompts."""
    most = graph_rows[-1]
    return (*(size for size in _BESIDE if size < most), most)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Row and token counts of a captured run of the model. Its decode rows come first, and then its prompts."""

    decode_rows: int
    prompt_tokens: int
    decode_tokens: int = 1
    """Tokens of each decode row."""
    adapters: bool = False
    """Tokens may have adapters, which takes kernels of their own."""

    @property
    def rows(self) -> int:
        return self.decode_rows + (PROMPT_ROWS if self.prompt_tokens else 0)

    @property
    def tokens(self) -> int:
        return self.decode_rows * self.decode_tokens + self.prompt_tokens


@dataclasses.dataclass(frozen=True)
class SampleShape:
    """Row count and options of a captured run of the sampler."""

    logits_rows: int
    filters: bool
    """The graph samples from the tokens that top_k, top_p and min_p keep, where rows ask for it, which takes a dozen kernels
    more."""
    masked: bool = False
    """Rows may have token masks."""


AnyShape = TypeVar("AnyShape", Shape, SampleShape)


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph that can be launched."""

    replay: Callable[[], None]
    version: int = 0
    """Version of the backends' captured state; the graph is stale if theirs is another."""


class EagerSteps:
    """Stands for ``StepGraphs`` where no step is captured: every step runs kernel by kernel."""

    nbytes = 0

    def count(self) -> GraphCount:
        return GraphCount(0, 0)

    def capture_next(self) -> GraphCount:
        return GraphCount(0, 0)

    def run_first(self) -> int:
        return 0

    def stop_capturing(self, reason: str) -> None:
        """Nothing is ever captured."""

    def drop(self) -> None:
        """Nothing is captured."""

    def shape_of(self, rows: RowArrays, adapters: bool) -> None:
        return None

    def sample_shape_of(self, rows: RowArrays, masks: HostMasks | None) -> None:
        return None

    def forward(self, shape: Shape, query_start: np.ndarray, places: np.ndarray, ends: np.ndarray) -> NoReturn:
        raise EngineError(f"{shape} is not captured")

    def sample(self, shape: SampleShape, masks: HostMasks | None) -> NoReturn:
        raise EngineError(f"{shape} is not captured")


class StepGraphs:
    """Captured graphs by their shapes."""

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
        self._decode_tokens = sorted({1, config.scheduler.decode_tokens})
        """Tokens of a decode row for which there are graphs: one, and one with all drafts."""
        self._adapters = (False, True) if config.scheduler.max_loras else (False,)
        most, room = config.graph_rows[-1], max(1, _MOST_LOGITS // model.spec.vocab_size)
        self._beside = rows_beside(config.graph_rows)
        self._prompt_tokens = config.graph_prompt_tokens
        # Fewer sizes than of decode rows: a padding row costs the sampler less than the model.
        self._logits_rows = tuple(
            size
            for size in self._decode_rows
            if size <= room and (size <= 8 or size == most or size % (16 if size <= 64 else 32) == 0)
        )
        # Which mask each logits row has, and the masks.
        self._words = -(-model.spec.vocab_size // 32)
        self._masks = torch.full((self._logits_rows[-1] * (1 + self._words),), -1, dtype=torch.int32, device=self._device)
        self._captured: dict[Shape | SampleShape, Captured] = {}
        self._compiled: set[Shape | SampleShape] = set()
        """Shapes that ran kernel by kernel."""
        self._missed: Counter[Shape | SampleShape] = Counter()
        """Steps that wanted a missing graph and replayed a larger one."""
        self._stand_ins = 0
        """Such steps since the last one that ran in its own shape."""
        self._num_shapes = sum(1 for _ in self.shapes())
        self._pool: Any = None
        """Memory that all graphs take their tensors from, one after the other."""
        self.nbytes = 0
        """Bytes that the captured graphs keep on the device."""
        self._failure = ""
        """Reason why a capture failed; nothing is captured after that, and steps without a graph run kernel by kernel."""

    def shapes(self) -> Iterator[Shape | SampleShape]:
        """Yields every shape that may be captured, so that the first ones can stand in for all others of their kind."""
        kinds = list(itertools.product(self._decode_tokens, self._adapters))
        decode = [Shape(rows, 0, *kind) for rows in _spread(self._decode_rows) for kind in kinds]
        prompts = [(rows, tokens) for tokens in _spread(self._prompt_tokens) for rows in _spread(self._beside)]
        mixed = [Shape(rows, tokens, *kind) for rows, tokens in prompts for kind in kinds]
        plain, filtered = ([SampleShape(rows, filters) for rows in _spread(self._logits_rows)] for filters in (False, True))
        for shapes in itertools.zip_longest(decode, plain, mixed, filtered):
            yield from (shape for shape in shapes if shape is not None)
        for filters in (False, True):
            yield from (SampleShape(rows, filters, masked=True) for rows in _spread(self._logits_rows))

    def shape_of(self, rows: RowArrays, adapters: bool) -> Shape | None:
        """The shape that ``forward`` runs the rows in; None: they have none. ``adapters``: some of them have one."""
        decode, own = rows.num_decode_rows, rows.counts
        width = int(own[0]) if decode else 1
        if width not in self._decode_tokens or (own[:decode] != width).any():
            return None
        prompts, tokens = len(rows) - decode, int(own[decode:].sum())
        if not prompts:
            return self._choose(Shape(size, 0, width, adapters) for size in _from(self._decode_rows, decode))
        beside = _from(self._beside, decode)
        if prompts > PROMPT_ROWS or not beside:
            return None
        rooms = _from(self._prompt_tokens, tokens)
        return self._choose(Shape(size, room, width, adapters) for room in rooms for size in beside)

    def sample_shape_of(self, rows: RowArrays, masks: HostMasks | None) -> SampleShape | None:
        """Returns the smallest shape in which ``sample`` can serve all that the rows ask for; None: there is none."""
        slots = rows.slots[rows.sampled]
        if not len(slots) or rows.num_logits_rows != len(slots) or (masks is not None and masks.allows_nothing):
            return None
        if not self._sampler.plain(slots, None if masks is None else masks.which >= 0):
            return None
        filters, masked = self._sampler.filters(slots), masks is not None
        return self._choose(SampleShape(size, filters, masked) for size in _from(self._logits_rows, len(slots)))

    def count(self) -> GraphCount:
        version = self._version
        current = sum(captured.version == version for captured in self._captured.values())
        return GraphCount(current, current if self._failure else self._num_shapes, self._failure)

    def _choose(self, shapes: Iterable[AnyShape]) -> AnyShape | None:
        """Chooses among shapes that have room for a step, the smallest first."""
        candidates = iter(shapes)
        smallest = next(candidates, None)
        if smallest is None or smallest in self._captured:
            return smallest
        larger = next((shape for shape in candidates if shape in self._captured), None)
        if self._failure or self._replanned:  # A backend that plans replays runs only in a graph.
            return larger
        if larger is not None:
            self._missed[smallest] += 1
            self._stand_ins += 1
            if self._stand_ins <= STAND_INS or self._missed[smallest] < max(self._missed.values()):
                return larger
        return smallest

    def capture_next(self) -> GraphCount:
        """Captures the most useful graph that is missing or stale, if there is one and no capture has failed."""
        version = self._version
        current = {shape for shape, captured in self._captured.items() if captured.version == version}
        shape = next((shape for shape in self.shapes() if shape not in current), None)
        if shape is not None and not self._failure:
            self._try_to_capture(shape, padding=True)
        return self.count()

    def run_first(self) -> int:
        """Runs the shapes whose graphs can stand in for all plain and filtered steps, on padding rows, which change nothing.
        Returns how many they are."""
        shapes = list(itertools.islice(self.shapes(), KINDS))
        for shape in shapes:
            self._pad(shape)
            self._run(shape)
        return len(shapes)

    def _try_to_capture(self, shape: Shape | SampleShape, *, padding: bool) -> None:
        """Captures a graph, or notes why it cannot be captured, after which no other is tried. Graphs that exist stay valid.

        Args:
            padding: compiles the kernels first, by running them on padding rows in place of those that have been sent.
        """
        version = self._version
        try:
            if padding:
                self._compile(shape)
            self._captured[shape] = dataclasses.replace(self._capture(shape), version=version)
        except RuntimeError as error:  # The model waits for the GPU, or no memory is left.
            self._failure = eager_reason(error, self._model)
        self._missed.pop(shape, None)

    def stop_capturing(self, reason: str) -> None:
        """Captures nothing more, as after a capture that failed."""
        self._failure = self._failure or reason

    def drop(self) -> None:
        """Forgets all graphs, which read memory that is given back. They are captured again as at first."""
        self._captured.clear()
        self._missed.clear()
        self._pool, self.nbytes = None, 0

    def forward(self, shape: Shape, query_start: np.ndarray, places: np.ndarray, ends: np.ndarray) -> bool:
        """Runs the model for the rows that have been sent as ``shape``. Returns whether a graph was replayed.

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
        return self._launch(shape)

    def sample(self, shape: SampleShape, masks: HostMasks | None) -> None:
        """Samples from the logits inputs, and advances the slots."""
        if masks is not None:
            masks.copy_to(self._masks, self._logits_rows[-1])
        self._sampler.send()
        self._launch(shape)

    def _launch(self, shape: Shape | SampleShape) -> bool:
        """Replays the shape's graph, which is captured now if its kernels are compiled; otherwise launches them one by one."""
        if shape not in self._captured:
            self._stand_ins = 0
            if shape in self._compiled and not self._failure:
                self._try_to_capture(shape, padding=False)
            self._compiled.add(shape)
        if shape in self._captured:
            self._captured[shape].replay()
            return True
        self._run(shape)
        return False

    @property
    def _version(self) -> int:
        return sum(backend.graph_version for backend in self._replanned)

    def _compile(self, shape: Shape | SampleShape) -> None:
        """Runs padding rows, which change nothing: compiles what is not compiled yet, which a capture must not."""
        self._pad(shape)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(shape)
            if not self._captured:
                # A model that waits for the GPU raises here: a capture that fails halfway leaves CUDA's state broken.
                with no_host_sync():
                    self._run(shape)
        torch.cuda.current_stream().wait_stream(stream)

    def _capture(self, shape: Shape | SampleShape) -> Captured:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            self._run(shape)
        self.nbytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return Captured(graph.replay)

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

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
        query_start = np.minimum(np.arange(shape.rows + 1), shape.decode_rows) * shape.decode_tokens
        query_start[shape.decode_rows + 1 :] = shape.tokens
        extras = StepExtras(segments=[Segment(0, shape.tokens, 0)]) if shape.adapters else NO_EXTRAS
        self._forward(Bounds(shape.decode_rows, query_start, np.full(shape.rows, self._max_len), captured=True), extras)

    def _draw(self, shape: SampleShape) -> None:
        given, asked, tables = self._buffers.logits(), self._sampler.sampling_state, self._tables
        slots, positions = given.slots[: shape.logits_rows], given.positions[: shape.logits_rows]
        logits = self._model.logits(given.hidden[: shape.logits_rows])
        if shape.masked:
            most = self._logits_rows[-1]
            sampling.apply_masks(logits, self._masks[most:].view(most, -1), self._masks[: shape.logits_rows])
        sampling.kernels.sample(
            logits,
            asked.temperatures,
            asked.keys,
            positions,
            slots,
            asked.filters if shape.filters else None,
            sampling.kernels.SlotTokens(tables.token_ids.tensor, tables.num_tokens, given.outcome),
        )


def _from(sizes: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Returns the ascending sizes that are large enough."""
    return sizes[bisect.bisect_left(sizes, least) :]


def _spread(sizes: tuple[int, ...]) -> Iterator[int]:
    """Orders ascending sizes: the largest, the one in the middle, those in the middle of what is left, and so on."""
    if not sizes:
        return
    yield sizes[-1]
    ranges = deque([(0, len(sizes) - 1)])
    while ranges:
        start, end = ranges.popleft()
        if start < end:
            middle = (start + end) // 2
            yield sizes[middle]
            ranges += [(middle + 1, end), (start, middle)]
