"""ModelRunner: executes plans. Its state is a function of the plans it was given, in their order."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from headrace.attention.backend import AttentionBackend, LayerCache, workspace_bytes
from headrace.cache.blocks import ArenaBlocks, clear
from headrace.config import EngineConfig
from headrace.core.plan import (
    GraphCount,
    LayerRange,
    NewSequence,
    Recorded,
    RunnerEvent,
    SamplePlan,
    StepPlan,
    StepResult,
    pack_tokens,
)
from headrace.errors import EngineError, RequestError
from headrace.models.interface import Model
from headrace.models.vision.interface import VisionEncoder
from headrace.outputs import Failure, TokenLogprobs
from headrace.runner.build import add_pieces, make_backends, make_caches, make_parts
from headrace.runner.graphs import EagerSteps, StepGraphs
from headrace.runner.inputs import ForwardPass, StepBuffers
from headrace.runner.part import StepExtras, StepHandle
from headrace.runner.prompts import POOLED_NOT_FINITE, PromptResults
from headrace.runner.slots import Bounds, RowArrays, SlotTables
from headrace.sampling.feature import Indices, LogitsRows
from headrace.sampling.masks import HostMasks
from headrace.sampling.sampler import FAULTS, NOT_FINITE, Sampler
from headrace.text.vocab import TokenBytes

logger = logging.getLogger("headrace.engine")

BROKEN = Failure("the model gave hidden states that are not finite")


class ModelRunner:
    """Runs a model over the slots' sequences.

    Args:
        model: gives hidden states of a step's tokens, and logits of hidden states.
        config: sizes of slots and block tables.
        token_bytes: the text of tokens; None: sequences with bad words are refused.
        caches: the KV of each layer; None: allocated as the config says.
        backends: the attention of each layer, where layers may share one; None: those that the config names.
        encoder: of pictures and videos; None: the model has none, or is used without.

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
        encoder: VisionEncoder | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self._model = model
        self._caches = make_caches(config) if caches is None else caches
        self._blocks = ArenaBlocks(config.cache, self._caches) if config.cache.shared else None
        self._backends = make_backends(config) if backends is None else backends
        self.encoder = encoder
        with torch.inference_mode():
            self.slots = SlotTables(config, self.device)
            self.sampler = Sampler(config.scheduler.max_num_seqs, model.spec.vocab_size, self.device, token_bytes)
            self._buffers = StepBuffers(config, self.device)
            self.parts = make_parts(config, model, encoder, self._blocks, self._buffers, self._backends)
            """Optional subsystems; those that the model does not need are not in it."""
        self._forward = ForwardPass(model, self._caches, self._backends, self.slots, self._buffers, self.parts)
        self._pieces = add_pieces(config, model, self._forward, self._buffers, self.parts)
        self._unsampled: StepHandle | None = None
        """Executed, and not sampled yet."""
        self._prompts = PromptResults(model)
        self._refused: dict[int, Failure] = {}
        """slot -> why its sequence cannot be served."""
        self._unheard: list[NewSequence] = []
        """New sequences that the sampler has not heard of: it does while the device runs their first step's model."""
        self._tainted = config.cache.mixed
        """There may be KV that is not finite in blocks that are free, or will be."""
        self._graphs = self._make_graphs()

    @property
    def backends(self) -> Sequence[AttentionBackend]:
        """The attention of each layer."""
        return self._backends

    def _make_graphs(self) -> StepGraphs | EagerSteps:
        if not self.config.graph_rows or any(not backend.capturable for backend in self._forward.to_plan):
            return EagerSteps()
        return StepGraphs(self._model, self._forward, self.slots, self._buffers, self.sampler, self.config)

    @torch.inference_mode()
    def capture_next(self) -> GraphCount:
        """Captures one CUDA graph more, the most useful one that is missing; to be called between steps."""
        if self._unsampled is not None:
            raise EngineError(f"step {self._unsampled.step} has not been sampled")
        before, count = self._graphs.count(), self._graphs.capture_next()
        if count != before:
            self.note(RunnerEvent("capture"))
        return count

    @torch.inference_mode()
    def run_first(self) -> int:
        """Runs the steps whose kernels the first requests need, on padding rows. Returns how many; 0: there are no graphs."""
        return self._graphs.run_first()

    def stop_capturing(self, reason: str) -> None:
        self._graphs.stop_capturing(reason)

    def drop_graphs(self) -> None:
        """Forgets all CUDA graphs, and frees their memory. They are captured again by ``capture_next`` or by later steps."""
        if self._unsampled is not None:
            raise EngineError(f"step {self._unsampled.step} has not been sampled")
        self._graphs.drop()

    @property
    def caches(self) -> Sequence[LayerCache]:
        """The KV of each layer."""
        return self._caches

    def graphs(self) -> GraphCount:
        return self._graphs.count()

    def note(self, event: Recorded) -> None:
        """Tells the parts what is about to be executed, or what else bears on later steps."""
        for part in self.parts:
            part.note(event)

    # ------------------------------------------------------------------ a step

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepHandle:
        """Launches the model of a step, which is to be sampled before the next is executed.

        Raises:
            EngineError: the plan breaks the contract; the runner must not be used again.
        """
        if self._unsampled is not None:
            raise EngineError(f"step {plan.step} comes before step {self._unsampled.step} has been sampled")
        self.note(plan)
        if plan.moves:
            self._move_blocks(plan)
        self._change_slots(plan)
        step = self._unsampled = StepHandle.begin(plan.step, self.device)
        if plan.rows:
            self._run_model(plan, step)
        self._tell_sampler()
        step.refused = self._refusals(plan)
        return step

    def _run_model(self, plan: StepPlan, step: StepHandle) -> None:
        """Runs the model for a plan, up to the inputs of the sampler."""
        rows = RowArrays(plan)
        step.seq_ids = rows.seq_ids
        fresh_blocks = self.slots.begin(plan, rows)
        if rows.num_logits_rows > self._buffers.num_logits_rows:
            raise EngineError(f"step {plan.step} has {rows.num_logits_rows} logits rows; {self._buffers.num_logits_rows} fit")
        if self._tainted and self._blocks is not None:
            self._blocks.clear(fresh_blocks)
        elif self._tainted:
            clear(self._caches, fresh_blocks)
        self._buffers.next_step()
        batch, own = plan, rows
        if plan.layers is not None:
            batch = msgspec.structs.replace(plan, rows=plan.rows[:-1], layers=None)
            own = RowArrays(batch)
        if batch.rows:
            self._run_batch(batch, step, own)
        else:
            step.stopwatch.mark()
        if plan.layers is not None:
            self._run_piece(plan, plan.layers, step, own.num_logits_rows)
        step.rows = own if rows.unfinished.any() else rows
        self.slots.end(step.rows)
        for part in self.parts:
            part.end(step.rows, step)

    def _run_batch(self, plan: StepPlan, step: StepHandle, rows: RowArrays) -> None:
        """Runs rows that compute all layers."""
        extras = StepExtras()
        for part in self.parts:
            part.take(rows, extras)
        self._refused |= extras.refused
        whole = self._prompts.wanted(rows)
        shape = None if extras.eager or whole else self._graphs.shape_of(rows, bool(extras.segments))
        step.stopwatch.mark()
        if shape is not None:
            step.num_places = shape.rows
            step.places = self._buffers.send(rows, shape.decode_rows, shape.rows, shape.decode_tokens)
            query_start = self._buffers.query_start(shape.rows)
            step.replayed = self._graphs.forward(shape, query_start, step.places, rows.ends)
            step.padding_tokens = shape.tokens - int(rows.counts.sum())
        else:
            step.replayed, step.num_places = False, len(rows)
            step.places = self._buffers.send(rows, rows.num_decode_rows, len(rows))
            # Experts are recorded of all tokens.
            ends = None if whole or self.config.experts is not None else rows
            hidden = self._forward(Bounds.of(rows), extras, ends)
            if whole:
                self._prompts.add_to(step, plan.rows, hidden)

    def _run_piece(self, plan: StepPlan, layers: LayerRange, step: StepHandle, logits_row: int) -> None:
        """Runs layers of the last row, behind the others. ``logits_row``: of its last token, if it has one."""
        own = plan.rows[-1:]
        rows, place = RowArrays(msgspec.structs.replace(plan, rows=own, num_decode_rows=0)), step.num_places
        step.places = np.append(step.places, place)
        step.num_places = place + 1
        hidden = self._pieces.run(own[0], rows, layers, step, place, logits_row)
        if hidden is not None:
            self._prompts.add_to(step, own, hidden)

    @torch.inference_mode()
    def sample(self, step: StepHandle, plan: SamplePlan) -> None:
        """Launches sampling of the step that was executed last, and the copy of its outcome to the host.

        Raises:
            EngineError: the plan is of another step, or does not fit it; the runner must not be used again.
        """
        if step is not self._unsampled or plan.step != step.step:
            raise EngineError(f"a sample plan of step {plan.step} for step {step.step}, which is not the one to be sampled")
        self._unsampled = None
        if plan:
            self.note(plan)
        rows = step.rows
        if rows is None:
            return
        masks = HostMasks.of(plan, rows.seq_ids[rows.row_of], self._model.spec.vocab_size) if rows.num_logits_rows else None
        shape = self._graphs.sample_shape_of(rows, masks)
        if shape is None:
            step.stopwatch.mark()
            if rows.num_logits_rows:
                self._sample_eagerly(step, rows, masks)
        else:
            self._graphs.sample(shape, masks)
        step.outcome = self._buffers.fetch(max(step.num_places, rows.num_logits_rows))
        step.stopwatch.mark()

    def _sample_eagerly(self, step: StepHandle, rows: RowArrays, masks: HostMasks | None) -> None:
        """Samples kernel by kernel, with all that rows may ask of the sampler."""
        count, row, given = rows.num_logits_rows, rows.row_of, self._buffers.logits()
        slots, slots_device, positions = rows.slots[row], given.slots[:count], given.positions[:count]
        # Tokens before the one that is sampled: the row's, less those behind the logits row's own.
        lengths = rows.ends[row] - (rows.logits_start[row + 1] - 1 - np.arange(count))
        drafts = self.slots.token_ids.tensor[slots_device, positions].long() if count > len(rows.sampled) else None
        sampled = self.sampler.sample(
            self._model.logits(given.hidden[:count]),
            LogitsRows(slots, lengths - self.slots.prompt_len[slots], slots_device, positions, row, drafts),
            None if masks is None else masks.upload(self.device),
        )
        self.slots.append(rows, slots_device, positions, sampled.tokens, sampled.counts)
        torch.sub(sampled.tokens, sampled.faults, out=given.outcome[:count, 0])
        step.fetch(sampled)

    def collect(self, step: StepHandle) -> StepResult:
        """Waits for a sampled step and reads its outcome."""
        rows = step.rows
        if rows is None:
            return StepResult(step.step, [], [])
        if step.outcome is None:
            raise EngineError(f"step {step.step} has not been sampled")
        step.stopwatch.wait()
        outcome = step.outcome.numpy()
        kept = rows.num_logits[rows.sampled] if step.counts is None else step.counts.numpy()
        errors = self._errors(step, rows, outcome, kept)
        seq_ids = rows.seq_ids[rows.sampled].tolist()
        tokens = outcome[: rows.num_logits_rows, 0].tolist()
        if step.counts is None and rows.num_logits_rows == len(seq_ids):
            token_ids = [[token] for token in tokens]
        else:
            starts = rows.logits_start[rows.sampled].tolist()
            token_ids = [tokens[start : start + count] for start, count in zip(starts, kept.tolist(), strict=True)]
            self.slots.correct(rows, kept)
        if errors:
            token_ids = [[] if seq in errors else own for seq, own in zip(seq_ids, token_ids, strict=True)]
        forward, sample = [*step.stopwatch.seconds(), 0.0][:2]
        return StepResult(
            step.step,
            seq_ids,
            token_ids,
            _logprobs(step, rows, dict(zip(seq_ids, token_ids, strict=True))) if step.logprobs else {},
            {
                seq: [entry for part in parts for entry in part.lists()]
                for seq, parts in step.prompt_logprobs.items()
                if seq not in errors
            },
            errors,
            forward,
            sample,
            step.replayed,
            step.padding_tokens,
            {seq_id: outcome for part in step.sparse for seq_id, outcome in part.outcomes().items()},
            {seq_id: experts for part in step.routed for seq_id, experts in part.lists().items()},
            {seq: result.astype("<f4").tobytes() for seq, result in step.pooled_results() if seq not in errors},
        )

    def _errors(self, step: StepHandle, rows: RowArrays, outcome: npt.NDArray[np.int32], kept: Indices) -> dict[int, Failure]:
        """seq_id -> why it cannot go on. ``kept``: tokens of each row with logits that its sequence goes on with."""
        tokens, broken = outcome[: rows.num_logits_rows, 0], outcome[step.places, 1]
        errors: dict[int, Failure] = {}
        if len(tokens) and tokens.min() < 0:
            places = np.flatnonzero(tokens < 0)
            own = rows.row_of[places]
            errors = {
                int(rows.seq_ids[row]): FAULTS[-int(tokens[place])]
                for row, place, count in zip(own, places, kept[np.searchsorted(rows.sampled, own)], strict=True)
                if place - rows.logits_start[row] < count
            }
        for seq_id, parts in step.prompt_logprobs.items():
            if any(bool(part.logprobs.isnan().any()) for part in parts):
                errors[seq_id] = NOT_FINITE
        errors |= {seq_id: POOLED_NOT_FINITE for seq_id, result in step.pooled_results() if not np.isfinite(result).all()}
        if broken.any():
            self._tainted = True
            errors |= dict.fromkeys(step.seq_ids[broken > 0].tolist(), BROKEN)
        return errors | step.refused

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def memory(self) -> list[tuple[str, int]]:
        """(what, bytes) of everything that the runner itself holds on the device now."""
        planes = [plane for cache in self._caches for plane in (cache.rows, cache.index_keys) if plane is not None]
        storages = [plane.untyped_storage() for plane in planes]
        held = {
            "KV cache": sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
            "attention workspaces": workspace_bytes(self._forward.to_plan),
            "slots": self.slots.nbytes + self._buffers.nbytes + self._prompts.nbytes,
            "penalty histograms": self.sampler.nbytes,
        }
        for part in self.parts:
            held[part.memory_label] = held.get(part.memory_label, 0) + part.nbytes
        return [*held.items(), ("CUDA graphs", self._graphs.nbytes)]

    # ------------------------------------------------------------------ parts of a step

    def _move_blocks(self, plan: StepPlan) -> None:
        """Launches the moves behind earlier steps, which may still write the old places, and before this step's writes."""
        if self._blocks is None:
            raise EngineError("the plan moves KV blocks, and there is only one cache group")
        self._blocks.move(plan.moves)
        self.slots.rename(plan.moves)

    def _change_slots(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self.slots.release(slot)
            self.sampler.remove(slot)
            self._prompts.remove(slot)
            self._refused.pop(slot, None)
        if plan.released:
            for part in self.parts:
                part.release(plan.released)
        if plan.new:
            self._take_in(plan)
        for part in self.parts:
            part.begin(plan)

    def _take_in(self, plan: StepPlan) -> None:
        known = [self._with_known_tokens(seq) for seq in plan.new]
        self.slots.take(known)
        for seq in known:
            self._prompts.add(seq)
        self._unheard = known

    def _tell_sampler(self) -> None:
        for seq in self._unheard:
            try:
                self.sampler.add(seq.slot, seq)
            except RequestError as error:
                self._refused[seq.slot] = Failure(error.message, client=True, code=error.code, param=error.param)
            except Exception as error:
                logger.exception("sequence %d cannot be sampled", seq.seq_id)
                self._refused[seq.slot] = Failure(f"the request cannot be sampled: {type(error).__name__}: {error}")
        self._unheard = []

    def _with_known_tokens(self, seq: NewSequence) -> NewSequence:
        """An id outside the vocabulary would take the whole step down: its sequence is refused and goes on with others."""
        size = self._model.spec.vocab_size
        if not seq.token_ids or 0 <= min(seq.token_ids) <= max(seq.token_ids) < size:
            return seq
        self._refused[seq.slot] = Failure(f"the prompt has a token id outside the vocabulary of {size}", client=True)
        return msgspec.structs.replace(seq, token_ids=pack_tokens([0] * len(seq.token_ids)))

    def _refusals(self, plan: StepPlan) -> dict[int, Failure]:
        """seq_id -> why, for rows of sequences that cannot be served."""
        if not self._refused:
            return {}
        return {row.seq_id: self._refused[row.slot] for row in plan.rows if row.slot in self._refused}


def _logprobs(step: StepHandle, rows: RowArrays, token_ids: dict[int, list[int]]) -> dict[int, list[TokenLogprobs]]:
    """seq_id -> an entry for each of its ``token_ids``, for sequences that asked."""
    entries = {place: entry for own, part in step.logprobs for place, entry in zip(own.tolist(), part.lists(), strict=True)}
    found: dict[int, list[TokenLogprobs]] = {}
    for place in sorted(entries):
        seq_id = int(rows.seq_ids[rows.row_of[place]])
        own = found.setdefault(seq_id, [])
        if len(own) < len(token_ids[seq_id]):
            own.append(entries[place])
    return {seq_id: own for seq_id, own in found.items() if own}
