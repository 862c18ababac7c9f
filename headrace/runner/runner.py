"""ModelRunner: executes plans. Its state is a function of the plans it was given, in their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from headrace.attention.backend import AttentionBackend, LayerCache, distinct, workspace_bytes
from headrace.attention.context import ForwardContext
from headrace.cache.blocks import ArenaBlocks
from headrace.config import EngineConfig
from headrace.core.plan import NewSequence, StepPlan, StepResult
from headrace.errors import EngineError, RequestError
from headrace.kernels.transfer import upload
from headrace.outputs import TokenLogprobs
from headrace.runner.build import make_backends, make_caches, make_recorder
from headrace.runner.clock import Stopwatch
from headrace.runner.graphs import Replayed, Shape, StepGraphs
from headrace.runner.inputs import Batch, Ending, broken_rows, build_batch, build_ending
from headrace.runner.model import Model
from headrace.runner.record import Recorder
from headrace.runner.slots import RowArrays, SlotTables
from headrace.sampling.device import Download
from headrace.sampling.feature import Indices
from headrace.sampling.logprobs import Measured, measure_in_slices
from headrace.sampling.sampler import NOT_FINITE, Sampled, Sampler
from headrace.text.vocab import TokenBytes

_LOGITS_BYTES = 64 * 2**20
"""The most that the logits of prompt tokens take at a time."""
BROKEN = "the model gave hidden states that are not finite"


@dataclasses.dataclass(frozen=True)
class Launched:
    """A step under way, with the ids that its results belong to."""

    step: int
    seq_ids: list[int]
    """Of all rows."""
    drawing: Indices
    """The rows that draw."""
    refused: dict[int, str]
    """seq_id -> why it was not taken in at all."""
    stopwatch: Stopwatch
    download: Download
    sampled: Sampled | None
    """On the host once ``download`` is complete."""
    prompt_logprobs: dict[int, list[Measured]]
    broken: torch.Tensor | None
    """``[R]`` bool: rows whose hidden states are not finite. On the host once ``download`` is complete."""
    replayed: bool | None
    """As ``StepResult.replayed``, and so is ``padding_tokens``."""
    padding_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class LaunchedWhole:
    """A step under way that was launched as a whole."""

    step: int
    seq_ids: list[int]
    """Of all rows."""
    samples: npt.NDArray[np.bool_]
    """``[R]``: the rows that draw."""
    replayed: Replayed
    padding_tokens: int


class ModelRunner:
    """Runs a model over the slots' sequences.

    Args:
        model: gives hidden states of a step's tokens, and logits of hidden states.
        config: sizes of slots and block tables.
        token_bytes: the text of tokens; None: sequences with bad words are refused.
        caches: the KV of each layer; None: allocated as the config says.
        backends: the attention of each layer, where layers may share one; None: those that the config names.
        recorder: told of every plan before it is executed; None: as the config says.

    Raises:
        ConfigError: what the config names cannot be made.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        token_bytes: TokenBytes | None,
        *,
        caches: Sequence[LayerCache] | None = None,
        backends: Sequence[AttentionBackend] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self._model = model
        self._caches = make_caches(config) if caches is None else caches
        self._blocks = ArenaBlocks(config.cache, self._caches) if len(config.cache.groups) > 1 else None
        self._backends = make_backends(config) if backends is None else backends
        self._to_plan = distinct(self._backends)
        self._recorder = make_recorder(config) if recorder is None else recorder
        with torch.inference_mode():
            self.slots = SlotTables(config, self.device)
            self.sampler = Sampler(config.scheduler.max_num_seqs, model.spec.vocab_size, self.device, token_bytes)
        self._prompt_logprobs: dict[int, NewSequence] = {}
        """Sequences by slot that want logprobs of their prompt."""
        self._refused: dict[int, str] = {}
        """slot -> why its sequence cannot be served."""
        self._tainted = False
        """There may be KV that is not finite in blocks that are free, or will be."""
        self._graphs = self._make_graphs()
        self._slice = max(1, _LOGITS_BYTES // (4 * model.spec.vocab_size))

    def _make_graphs(self) -> StepGraphs | None:
        if not self.config.graph_rows or any(not backend.capturable for backend in self._to_plan):
            return None
        return StepGraphs(self._model, self._caches, self._backends, self.slots, self.sampler, self.config)

    @torch.inference_mode()
    def capture_graphs(self, seconds: float, progress: Callable[[float, str], None]) -> tuple[int, int]:
        """Captures CUDA graphs, as many as come within the time. Returns how many there are, and how many there may be."""
        return (0, 0) if self._graphs is None else self._graphs.capture(seconds, progress)

    def launch(self, plan: StepPlan) -> Launched | LaunchedWhole:
        """Starts a step.

        Raises:
            EngineError: the plan breaks the contract; the runner must not be used again.
        """
        if self._recorder is not None:
            self._recorder.write(plan)
        return self.execute(plan)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Launched | LaunchedWhole:
        """``launch`` without recording."""
        if plan.moves:
            self._move_blocks(plan)
        self._change_slots(plan)
        if not plan.rows:
            return self._nothing(plan)
        rows = RowArrays(plan)
        fresh_blocks = self.slots.begin(plan, rows)
        if self._tainted:
            self._clear(fresh_blocks)
        shape = None
        if self._graphs is not None and self._replayable(rows):
            drawing = rows.slots[rows.samples]
            shape = self._graphs.shape_of(rows, draws=self.sampler.draws_only(drawing), filters=self.sampler.filters(drawing))
        if shape is None:
            return self._launch_each(plan, rows)
        return self._launch_whole(plan, rows, shape) if shape.draws else self._launch_model(plan, rows, shape)

    def _replayable(self, rows: RowArrays) -> bool:
        """Whether what the model does for these rows may be in a graph: of their prompts, no logprobs are wanted."""
        if self._refused or not (rows.counts[rows.decode] == 1).all():
            return False
        return not self._prompt_logprobs or not any(slot in self._prompt_logprobs for slot in rows.slots[~rows.decode].tolist())

    def _launch_whole(self, plan: StepPlan, rows: RowArrays, shape: Shape) -> LaunchedWhole:
        """Model and draws in one launch."""
        replayed = self._of_graphs.launch(shape, rows)
        self.slots.end(rows)
        return LaunchedWhole(plan.step, rows.seq_ids.tolist(), rows.samples, replayed, _padding(shape, rows))

    def _launch_model(self, plan: StepPlan, rows: RowArrays, shape: Shape) -> Launched:
        """The model in one launch, and the sampler with all that rows ask of it behind it."""
        stopwatch, download = Stopwatch(self.device), Download(self.device)
        stopwatch.mark()
        logits, broken, places = self._of_graphs.forward(shape, rows)
        ending = build_ending(rows, self.slots, places)
        own = logits.index_select(0, ending.last_drawing) if len(ending.drawing) else None
        stopwatch.mark()
        return self._finish(plan, rows, ending, own, broken.index_select(0, ending.last), {}, stopwatch, download, shape)

    @property
    def _of_graphs(self) -> StepGraphs:
        if self._graphs is None:
            raise EngineError("there are no CUDA graphs here")
        return self._graphs

    def _nothing(self, plan: StepPlan) -> Launched:
        stopwatch, download = Stopwatch(self.device), Download(self.device)
        download.sent()
        return Launched(plan.step, [], np.empty(0, np.int64), {}, stopwatch, download, None, {}, None, None)

    def _launch_each(self, plan: StepPlan, rows: RowArrays) -> Launched:
        """A step of any rows, kernel by kernel."""
        stopwatch, download = Stopwatch(self.device), Download(self.device)
        batch = build_batch(rows, self.slots)
        ending = build_ending(rows, self.slots, batch.step.query_start_host[1:] - 1)
        stopwatch.mark()
        hidden = self._forward(batch)
        broken = broken_rows(hidden, batch.step.query_start, single=bool((rows.counts == 1).all()))
        logits = self._model.logits(hidden[ending.last_drawing]) if len(ending.drawing) else None
        stopwatch.mark()
        prompt_logprobs = self._measure_prompts(plan, hidden)
        return self._finish(plan, rows, ending, logits, broken, prompt_logprobs, stopwatch, download)

    def _finish(
        self,
        plan: StepPlan,
        rows: RowArrays,
        ending: Ending,
        logits: torch.Tensor | None,
        broken: torch.Tensor,
        prompt_logprobs: dict[int, list[Measured]],
        stopwatch: Stopwatch,
        download: Download,
        shape: Shape | None = None,
    ) -> Launched:
        """Draws from ``logits [N, vocab]``, which are used up, and sends the outcome on its way to the host.

        ``shape``: of the graph that the model ran as; None: it was none.
        """
        sampled = None
        if logits is not None:
            sampled = self.sampler.sample(logits, ending.rows)
            self.slots.append(ending.rows.slots_device, ending.rows.positions, sampled.tokens)
        self.slots.advance(ending.slots, ending.ends)
        self.slots.end(rows)
        stopwatch.mark()
        launched = Launched(
            step=plan.step,
            seq_ids=rows.seq_ids.tolist(),
            drawing=ending.drawing,
            refused=self._refusals(plan),
            stopwatch=stopwatch,
            download=download,
            sampled=None if sampled is None else sampled.download(download),
            prompt_logprobs={seq: [part.download(download) for part in parts] for seq, parts in prompt_logprobs.items()},
            broken=download.copy(broken),
            replayed=shape is not None,
            padding_tokens=0 if shape is None else _padding(shape, rows),
        )
        download.sent()
        return launched

    def collect(self, launched: Launched | LaunchedWhole) -> StepResult:
        """Waits for a step and reads its outcome."""
        if isinstance(launched, LaunchedWhole):
            return self._collect_whole(launched)
        launched.download.wait()
        errors = self._errors(launched)
        sampled, seq_ids = launched.sampled, launched.seq_ids
        drawing = [seq_ids[row] for row in launched.drawing.tolist()]
        token_ids: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if sampled is not None:
            drawn = zip(drawing, sampled.tokens.tolist(), strict=True)
            token_ids = [[token] if seq not in errors else [] for seq, token in drawn]
            if sampled.logprobs:
                logprobs = {drawing[row]: [entry] for row, entry in sampled.lists().items() if drawing[row] not in errors}
        prompt_logprobs = {
            seq: [entry for part in parts for entry in part.lists()]
            for seq, parts in launched.prompt_logprobs.items()
            if seq not in errors
        }
        forward, sample = launched.stopwatch.seconds() or (0.0, 0.0)
        return StepResult(
            launched.step,
            drawing,
            token_ids,
            logprobs,
            prompt_logprobs,
            errors,
            forward,
            sample,
            launched.replayed,
            launched.padding_tokens,
        )

    def _collect_whole(self, launched: LaunchedWhole) -> StepResult:
        replayed = launched.replayed
        replayed.stopwatch.wait()
        drawn = replayed.tokens.numpy()[replayed.places]
        errors: dict[int, str] = {}
        if drawn.min() < 0:
            self._tainted = True
            errors = {launched.seq_ids[row]: BROKEN for row in np.flatnonzero(drawn < 0).tolist()}
        seq_ids = launched.seq_ids
        if not launched.samples.all():
            seq_ids = [seq_ids[row] for row in np.flatnonzero(launched.samples).tolist()]
            drawn = drawn[launched.samples]
        token_ids = [[token] if token >= 0 else [] for token in drawn.tolist()]
        (seconds,) = replayed.stopwatch.seconds()
        return StepResult(
            launched.step,
            seq_ids,
            token_ids,
            errors=errors,
            forward_seconds=seconds,
            replayed=True,
            padding_tokens=launched.padding_tokens,
        )

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def memory(self) -> list[tuple[str, int]]:
        """(what, bytes) of everything that the runner itself holds on the device now."""
        storages = [cache.rows.untyped_storage() for cache in self._caches]
        return [
            ("KV cache", sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())),
            ("attention workspaces", workspace_bytes(self._to_plan)),
            ("slots", self.slots.nbytes),
            ("penalty histograms", self.sampler.nbytes),
            ("CUDA graphs", 0 if self._graphs is None else self._graphs.nbytes),
        ]

    # ------------------------------------------------------------------ parts of a step

    def _move_blocks(self, plan: StepPlan) -> None:
        """Behind what was launched before, which may still write the old places, and before what this step writes there."""
        if self._blocks is None:
            raise EngineError("the plan moves KV blocks, and there is one cache group alone")
        self._blocks.move(plan.moves)
        self.slots.rename(plan.moves)

    def _change_slots(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self.slots.release(slot)
            self.sampler.remove(slot)
            self._prompt_logprobs.pop(slot, None)
            self._refused.pop(slot, None)
        if not plan.new:
            return
        known = [self._with_known_tokens(seq) for seq in plan.new]
        self.slots.take(known)
        for seq in known:
            try:
                self.sampler.add(seq.slot, seq)
            except RequestError as error:
                self._refused[seq.slot] = error.message
            if seq.sampling.prompt_logprobs is not None:
                self._prompt_logprobs[seq.slot] = seq

    def _with_known_tokens(self, seq: NewSequence) -> NewSequence:
        """An id outside the vocabulary would take the whole step down: its sequence is refused and goes on with others."""
        size = self._model.spec.vocab_size
        if not seq.token_ids or 0 <= min(seq.token_ids) <= max(seq.token_ids) < size:
            return seq
        self._refused[seq.slot] = f"the prompt has a token id outside the vocabulary of {size}"
        return msgspec.structs.replace(seq, token_ids=[0] * len(seq.token_ids))

    def _refusals(self, plan: StepPlan) -> dict[int, str]:
        """seq_id -> why, for rows of sequences that cannot be served."""
        if not self._refused:
            return {}
        return {row.seq_id: self._refused[row.slot] for row in plan.rows if row.slot in self._refused}

    def _forward(self, batch: Batch) -> torch.Tensor:
        for backend in self._to_plan:
            backend.plan(batch.step)
        return self._model(batch.ids, batch.positions, ForwardContext(batch.step, self._caches, self._backends))

    def _clear(self, blocks: list[list[int]]) -> None:
        """Zeros blocks. What a row sees of its last block is masked beyond its end, but NaN times zero is NaN all the same."""
        indices = [upload(np.array(own, dtype=np.int64), self.device) if own else None for own in blocks]
        for cache in self._caches:
            index = indices[cache.group]
            if index is not None:
                cache.rows.index_fill_(0, index, 0)

    def _errors(self, launched: Launched) -> dict[int, str]:
        """seq_id -> why it cannot go on. Read on the host."""
        errors: dict[int, str] = {}
        if launched.sampled is not None:
            errors = {launched.seq_ids[launched.drawing[row]]: fault for row, fault in launched.sampled.errors().items()}
        for seq_id, parts in launched.prompt_logprobs.items():
            if any(bool(part.logprobs.isnan().any()) for part in parts):
                errors[seq_id] = NOT_FINITE
        if launched.broken is not None and bool(launched.broken.any()):
            self._tainted = True
            errors |= {launched.seq_ids[row]: BROKEN for row in launched.broken.nonzero().flatten().tolist()}
        return errors | launched.refused

    def _measure_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[Measured]]:
        """seq_id -> logprobs of the prompt tokens after those of its chunk."""
        if not self._prompt_logprobs:
            return {}
        measured = {}
        start = 0
        for row in plan.rows:
            seq = self._prompt_logprobs.get(row.slot)
            if seq is not None:
                last = min(row.num_computed + row.num_tokens, seq.prompt_len - 1)
                known = np.array(seq.token_ids[row.num_computed + 1 : last + 1], dtype=np.int64)
                tokens = upload(known, self.device)
                own = hidden[start : start + len(tokens)]
                count = seq.sampling.prompt_logprobs or 0
                measured[row.seq_id] = measure_in_slices(self._model.logits, own, tokens, count, self._slice)
            start += row.num_tokens
        return measured


def _padding(shape: Shape, rows: RowArrays) -> int:
    """Tokens that a shape computes beyond the rows' own."""
    return shape.tokens - int(rows.counts.sum())
