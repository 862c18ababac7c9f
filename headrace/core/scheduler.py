"""Scheduler: makes a plan for each step and applies its results to the sequences."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from headrace.config import CacheConfig, SchedulerConfig
from headrace.core.admission import check_request
from headrace.core.budget import StepBudget, Waits
from headrace.core.items import affordable_length
from headrace.core.ordered import OrderedSequences, running_order, waiting_order
from headrace.core.pace import PrefillPace
from headrace.core.plan import Row, StepPlan, StepResult
from headrace.core.request import Request
from headrace.core.sequence import Sequence, SequenceUpdate, Status
from headrace.core.slots import AdapterSlots, Slots, check_places
from headrace.core.sparse_schedule import SparseSchedule, share_prompt
from headrace.core.states import StateSchedule
from headrace.core.step import ConstrainedRow, InFlightStep, StepBuilder
from headrace.core.stops import collect_pooled, collect_tokens, count_step, keep_prompt_logprobs
from headrace.errors import EngineError, RequestError
from headrace.kv import KVCacheManager, NewBlocks
from headrace.metrics.stats import EngineStats
from headrace.outputs import Failure, FinishReason


class Scheduler:
    """Decides which sequence computes what in each step.

    Prefill and decode share one budget of tokens and encoder work. Running sequences come first, in policy order; a prefill
    chunk leaves a token for every decoding sequence after it. Then waiting sequences are admitted in policy order, as long
    as there are a slot, budget, and KV blocks for all their tokens. A running sequence that finds no free block preempts the
    last running sequence by policy; if it is the last one itself, it waits. So the first sequence by policy always advances,
    and no two sequences preempt each other in turns.

    ``schedule`` may run ``pipeline_depth`` steps ahead of ``update``. Steps are collected in the order they were launched.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.kv = KVCacheManager(cache)
        self._states = None if self.kv.states is None else StateSchedule(self.kv, self.kv.states, cache, config, clock)
        policy = config.policy
        self._running = OrderedSequences(lambda seq: running_order(policy, seq))
        self._waiting = OrderedSequences(lambda seq: waiting_order(policy, seq))
        self._slots = Slots(config.max_num_seqs)
        self._adapters = AdapterSlots(config.max_loras)
        self._requests: dict[str, list[Sequence]] = {}
        """Unfinished sequences by request."""
        self._num_unfinished = 0
        self._next_seq_id = 0
        self._in_flight: deque[InFlightStep] = deque()
        self._last_step = 0
        self._failed: list[SequenceUpdate] = []
        """Updates of sequences that failed while a step was planned; the next ``update`` returns them."""
        self._starved: Sequence | None = None
        """A sequence whose next atomic item did not fit in the rest of the token budget: it goes first in the next step."""
        self._pace = PrefillPace(config.max_prefill_tokens_beside_decode, config.max_step_seconds)
        self._sparse = SparseSchedule(self.kv, config.sparse)
        self._counters = EngineStats()
        self._clock = clock
        self._waits = Waits(clock)
        self._weights = "0"  # The name of their version.

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request and returns its ``sampling.n`` sequences in order of their index.

        Raises:
            RequestError: the request can never be served, or its id is in use.
            QueueFullError: too many sequences are waiting.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id!r} is being served already", "request_id")
        check_request(request, self.config, self.kv, self.num_waiting)
        first = self._make_sequence(request, 0)
        siblings = [self._make_sequence(request, index, first) for index in range(1, request.sampling.n)]
        sequences = [first, *siblings]
        self._lead(first, siblings)
        self._requests[request.request_id] = sequences.copy()
        self._num_unfinished += len(sequences)
        return sequences

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends the unfinished sequences of a request and returns them."""
        sequences = self._requests.get(request_id, []).copy()
        # Siblings first: ending the first sample would promote one of them.
        for seq in reversed(sequences):
            self._end(seq, "abort")
        return sequences

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence for a reason that the scheduler does not check itself, such as a stop string."""
        self._end(seq, reason, stop_reason)

    @property
    def request_ids(self) -> list[str]:
        """Unfinished requests."""
        return list(self._requests)

    def preempt_all(self) -> None:
        """Takes slots and blocks from all running sequences. No step is in flight."""
        self._drop_waiting_blocks()
        for seq in self._running.snapshot():
            self._preempt(seq)

    def weights_changed(self, version: str, number: int = 0) -> int:
        """Separates KV and tokens of new weights from those before. No step is in flight. Returns the version's number."""
        self._weights = version
        for seq in (seq for sequences in self._requests.values() for seq in sequences):
            seq.versions.append((seq.num_outputs, version))
        return self.kv.bump_weight_version(number)

    def fail(self, seq: Sequence, error: Failure) -> None:
        """Ends an unfinished sequence with an error, which the next ``update`` reports."""
        self._end(seq, "error", error=error)
        self._failed.append(SequenceUpdate(seq, finish_reason="error", error=error))

    def has_work(self) -> bool:
        """True while a sequence is unfinished, a launched step is not collected, or hidden states are to be freed."""
        return bool(self._num_unfinished or self._in_flight or self._failed or self._sparse.abandoned)

    def unfinished(self) -> Iterator[Sequence]:
        every = (seq for sequences in self._requests.values() for seq in sequences)
        return (seq for seq in every if seq.status is not Status.FINISHED)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot: new, preempted, or waiting for their request's first sample."""
        return self._num_unfinished - len(self._running)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> StepPlan | None:
        """Returns the next step, or None if no step can be launched before another is collected or a request is added.

        A plan without rows lets ``update`` report sequences that failed while they were scheduled, or frees what an abandoned
        piece holds.
        """
        if len(self._in_flight) >= self.config.pipeline_depth:
            return None
        running = self._running.snapshot()
        num_decoding = sum([seq.num_computed >= seq.prefill_len for seq in running])
        # Drafts follow a known token, so that a row with drafts waits until no token of its sequence is in flight.
        ready = running if self.config.decode_tokens == 1 else [seq for seq in running if not seq.num_placeholders]
        budget = StepBudget(
            self.config.max_num_batched_tokens,
            self.config.max_num_encoder_tokens,
            reserved=num_decoding - (len(running) - len(ready)),
            prefill=self._pace.limit(num_decoding),
        )
        step = StepBuilder(budget, self.kv.moves, self.kv.no_blocks)
        if self._starved is not None:
            self._schedule_starved(step)
            ready = [seq for seq in ready if seq not in step]
        rest = iter(ready)
        while (seq := step.add_next_tokens(rest)) is not None:
            if seq.status is Status.RUNNING:
                decoding = seq.decoding
                self._continue(seq, step)
                budget.reserved = max(0, budget.reserved - decoding)
        first: Sequence | None = None
        while self._slots.num_free and budget.spendable > 0 and not budget.blocks_short:
            first = self._first_ready()
            if first is None or not self._admit(first, step):
                break
        if self._waiting:
            self._waits.stopped(self._slots.num_free, budget, first)
        if not step and (self._in_flight or not (self._failed or self._sparse.abandoned)):
            return None
        self._sparse.abandoned = False
        self._pace.launched(num_decoding, budget.prefilled)
        self._last_step += 1
        encodes = budget.encoder_tokens < self.config.max_num_encoder_tokens
        num_paced = self.config.max_num_batched_tokens - budget.tokens if budget.prefilled and not encodes else 0
        moves = self.kv.take_moves()
        self._counters.kv_blocks_moved += len(moves)
        state_ops = ((), ()) if self.kv.states is None else self.kv.states.take_ops()
        plan = step.build(self._last_step, self._slots.take_released(), moves, state_ops)
        self._in_flight.append(
            InFlightStep(self._last_step, step.continuing, step.others, step.constrained, num_paced, step.saves)
        )
        return plan

    def propose(self, seq: Sequence, drafts: tuple[int, ...]) -> None:
        """Lets the next row of a sequence verify drafts: as many as budget, blocks and its length allow.

        Raises:
            EngineError: the sequence is not decoding, one of its tokens is in flight, or there are more drafts than a decode
                row has room for.
        """
        if seq.status is not Status.RUNNING or not seq.decoding or seq.num_placeholders:
            raise EngineError(f"{seq!r} cannot have drafts: its last token is not known")
        if len(drafts) >= self.config.decode_tokens:
            raise EngineError(f"{len(drafts)} drafts for {seq!r}; decode rows have at most {self.config.decode_tokens} tokens")
        seq.drafts = drafts

    def constrained(self) -> list[ConstrainedRow]:
        """Rows of the last launched step that need masks."""
        return self._in_flight[-1].constrained if self._in_flight else []

    def masks_wait(self) -> bool:
        """Whether a mask of the last launched step depends on a token in flight: one that an earlier step samples."""
        *earlier, last = self._in_flight
        unknown = {row.seq.seq_id for step in earlier for row in step.constrained}
        return any(row.seq.seq_id in unknown and not row.seq.finished for row in last.constrained)

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Applies the result of the oldest launched step; returns the updates of the sequences that changed.

        Raises:
            EngineError: the result belongs to another step.
        """
        expected = self._in_flight[0].step if self._in_flight else "none"
        if not expected == plan.step == result.step:
            raise EngineError(f"result of step {result.step} for plan {plan.step}; the oldest step in flight is {expected}")
        collected = self._in_flight.popleft()
        self.kv.collected(plan.step)
        updates, self._failed = self._failed, []
        tokens = dict(zip(result.seq_ids, result.token_ids, strict=True))
        counters = self._counters
        special = result.errors or result.logprobs or result.sparse or result.routed_experts
        continuing = {} if special else collected.continuing
        for row in plan.rows:
            seq_id = row.seq_id
            token_ids = tokens.get(seq_id)
            seq = continuing.get(seq_id)
            if seq is not None and token_ids and token_ids[0] not in seq.ending_token_ids and seq.status is Status.RUNNING:
                # Most rows are such. The result is that of ``_apply``, at a fraction of its cost.
                seq.num_in_flight -= 1
                seq.num_placeholders -= 1
                seq.token_ids.append(token_ids[0])
                seq.num_collected = known = seq.num_collected + 1
                if known >= seq.blocks.due:
                    self.kv.advance(seq.blocks, known)
                counters.generation_tokens += 1
                updates.append(SequenceUpdate(seq, token_ids))
                continue
            seq = collected.continuing.get(seq_id) or collected.others[seq_id]
            seq.num_in_flight -= 1
            seq.num_placeholders -= row.num_logits
            if seq.status is not Status.FINISHED:
                update = self._apply(seq, row, plan.num_completed(row), token_ids, result)
                if update is not None:
                    updates.append(update)
        if collected.saves and self._states is not None:
            self._states.collected(collected.saves, result)
        if collected.num_paced:
            self._pace.measured(collected.num_paced, result.forward_seconds + result.sample_seconds)
        count_step(counters, result)
        return updates

    # ------------------------------------------------------------------ cache and statistics

    def stats(self) -> EngineStats:
        """Returns the statistics, except those that the engine fills in (``host_seconds``, CUDA graphs)."""
        stats = msgspec.structs.replace(
            self._counters,
            step=self._last_step,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            kv_blocks_used=self.kv.num_used,
            kv_blocks_total=self.kv.num_total,
            finished=self._counters.finished.copy(),
        )
        return stats if self._states is None else self._states.count(stats)

    def check_integrity(self) -> None:
        """Raises EngineError unless blocks, slots and queues agree; without work every block must be free."""
        self.kv.check_integrity()
        check_places(self._slots, list(self._running), list(self._waiting), self._requests, self._num_unfinished)
        if not self.has_work() and self.kv.num_used:
            raise EngineError(f"no sequence is left, but {self.kv.num_used} KV blocks are in use")

    # ------------------------------------------------------------------ scheduling: running sequences

    def _schedule_starved(self, step: StepBuilder) -> None:
        """Schedules the sequence whose atomic item did not fit in the rest of the last step, before all others."""
        seq, self._starved = self._starved, None
        budget = step.budget
        reserved, budget.reserved = budget.reserved, 0
        if seq is not None and seq.status is Status.RUNNING:
            self._continue(seq, step)
        elif seq is not None and self._first_ready() is seq and self._slots.num_free:
            self._admit(seq, step)
        budget.reserved = min(reserved, budget.tokens)

    def _continue(self, seq: Sequence, step: StepBuilder) -> None:
        """Adds a row for a running sequence, unless it must wait."""
        if seq.num_tokens >= seq.max_len:
            return  # A step in flight returns its last token.
        if seq.decoding:
            wanted = 1 + min(len(seq.drafts), step.budget.for_drafts, seq.max_len - seq.num_tokens - 1)
        else:
            wanted = self._chunk(seq, seq.num_computed, step)
        while wanted:
            new_blocks = self.kv.allocate(seq.blocks, seq.num_computed + wanted)
            if new_blocks is not None:
                self._add_row(seq, wanted, new_blocks, step)
                break
            wanted = self._with_fewer_blocks(seq, wanted, step)

    def _chunk(self, seq: Sequence, start: int, step: StepBuilder) -> int:
        """Length of the prefill chunk from ``start`` that the budget allows; may be 0."""
        if seq.whole(start):
            piece = seq.least_chunk(start)
            return piece if self._sparse.layers(seq, piece, step) else 0
        budget = step.budget
        least = seq.least_chunk(start)
        limit = budget.room(least)
        chunk = seq.cut(start, seq.num_tokens, limit)
        if chunk == 0 and self._starved is None and least > max(1, limit):
            self._starved = seq
        if not seq.items:
            return chunk
        # Encoder work needs no such precedence: only sequences earlier in the order spend it, once for each item.
        return affordable_length(start, chunk, seq.items, seq.num_encoded, budget.encoder_tokens)

    def _add_row(self, seq: Sequence, num_tokens: int, new_blocks: NewBlocks, step: StepBuilder) -> None:
        """Adds a row of the chunk that was granted; of a piece with the layers that the budget allows."""
        step.add_row(seq, num_tokens, new_blocks, self._sparse.begin(seq, num_tokens, step))
        if self._states is not None:
            self._states.row(seq, num_tokens, step)

    def _with_fewer_blocks(self, seq: Sequence, wanted: int, step: StepBuilder) -> int:
        """Returns how many of the wanted tokens to try next, since blocks are short.

        Fewer, or all of them once another sequence is preempted, or none: the sequence waits.
        """
        start = seq.num_computed
        room = self.kv.room(seq.blocks, start)
        least = 1 if seq.decoding else seq.least_chunk(start)
        if room >= least:
            return seq.cut(start, start + wanted, room)
        if self.kv.room(seq.blocks, start, pending=True) >= least or not self._make_room(seq, step):
            step.budget.blocks_short = True
            return 0
        return wanted

    def _make_room(self, seq: Sequence, step: StepBuilder) -> bool:
        """Frees blocks of a sequence later in the order. Returns False if ``seq`` has to wait, or has failed."""
        if self._drop_waiting_blocks():
            return True
        for victim in reversed(self._running):
            if victim is seq:
                break
            if victim not in step:
                self._preempt(victim)
                victim.num_preemptions += 1
                return True
        if len(self._running) == 1 and not seq.num_in_flight and not self.kv.num_pending:
            self._fail(seq)
        return False

    def _drop_waiting_blocks(self) -> bool:
        """Frees the shared prompt blocks of waiting samples, which then look up or compute their prompt themselves."""
        if self.kv.drop_forks():
            return True
        holders = [seq for seq in self._waiting if seq.blocks.capacity]
        for seq in holders:
            self.kv.free(seq.blocks, None)
        return bool(holders)

    def _preempt(self, seq: Sequence) -> None:
        """Takes slot and blocks from a running sequence. It moves to the front of its priority in the queue."""
        self._running.remove(seq)
        self._leave_slot(seq, None)
        seq.status = Status.PREEMPTED
        seq.num_computed = seq.num_collected = seq.num_encoded = 0
        seq.drafts = ()
        if seq.sparse is not None:
            seq.sparse.restart()
        self._waiting.add(seq)
        self._counters.num_preemptions += 1

    def _fail(self, seq: Sequence) -> None:
        """Ends a sequence that cannot continue although the whole cache is available to it."""
        reason = self.kv.too_small_for(seq.num_tokens, seq.least_chunk(seq.num_computed))
        error = Failure(f"the KV cache is too small to continue this sequence: {reason or 'it has the whole cache already'}")
        self.fail(seq, error)

    # ------------------------------------------------------------------ scheduling: waiting sequences

    def _first_ready(self) -> Sequence | None:
        """The head of the queue. Passed over, in their place, are sequences whose constraint is being compiled or whose adapter
        has no room."""
        return self._adapters.first(self._waiting, self._last_step)

    def _admit(self, seq: Sequence, step: StepBuilder) -> bool:
        """Gives the sequence at the head of the queue a slot and its first row; False if it and those behind it must wait."""
        if seq.num_in_flight:
            return False  # Just preempted: steps in flight still return tokens for it.
        forked = seq.blocks.capacity > 0
        if seq.whole(0) and seq.prompt_logprobs is None:
            self._sparse.recall(seq)
        hit = None if forked else self.kv.no_hit() if seq.computes_all else self.kv.match(seq.blocks)
        start = seq.blocks.capacity if hit is None else hit.num_tokens
        if self._states is not None:
            self._states.plan(seq, start, hit)
        if not self.kv.fits(seq.blocks, hit, seq.num_tokens, seq.least_chunk(start)):
            step.budget.blocks_short = not self._blocks_missing(seq)
            return not step.budget.blocks_short
        chunk = self._chunk(seq, start, step)
        if chunk == 0:
            return False
        self.kv.start(seq.blocks, hit, seq.num_tokens, seq.least_chunk(start))
        chunk = seq.cut(start, start + chunk, self.kv.room(seq.blocks, start))
        new_blocks = self.kv.allocate(seq.blocks, start + chunk)
        if not chunk or new_blocks is None:
            raise EngineError(f"{seq!r} was admitted without blocks for its first chunk")
        self._waiting.remove(seq)
        self._start(seq, start, first_time=seq.status is Status.WAITING, forked=forked)
        self._running.add(seq)
        if self._states is not None:
            self._states.started(seq, start)
        step.add_new(seq)
        self._add_row(seq, chunk, new_blocks, step)
        return True

    def _blocks_missing(self, seq: Sequence) -> bool:
        """Handles a head of the queue that does not fit. Returns True if the state changed and admission can be tried again."""
        if self._running or self._in_flight or self.kv.num_pending:
            return False
        if not self._drop_waiting_blocks():
            self._fail(seq)
        return True

    def _start(self, seq: Sequence, num_cached: int, *, first_time: bool, forked: bool) -> None:
        seq.slot = self._slots.take()
        self._adapters.take(seq)
        seq.status = Status.RUNNING
        seq.prefill_len = len(seq.token_ids) + seq.pooled
        seq.num_computed = seq.num_collected = num_cached
        if seq.siblings:
            seq.blocks.keep_from = self.kv.fork_boundary(seq.blocks, seq.num_prompt)
        if not first_time:
            seq.num_cached_tokens = min(seq.num_cached_tokens, num_cached)
            return
        self._waits.started(seq)
        if forked or seq.index > 0:
            return
        counters = self._counters
        counters.prompt_tokens += seq.num_prompt
        if self.kv.caching and not seq.computes_all:
            counters.prefix_query_tokens += seq.num_prompt
            counters.prefix_hit_tokens += num_cached
        seq.num_cached_tokens = num_cached
        for sibling in seq.siblings:
            sibling.num_cached_tokens = num_cached

    def _apply(
        self, seq: Sequence, row: Row, num_completed: int, token_ids: list[int] | None, result: StepResult
    ) -> SequenceUpdate | None:
        """Applies the result of one row to its sequence, which is unfinished.

        Args:
            num_completed: tokens of the row that the step has computed in all layers.
        """
        error = result.errors.get(seq.seq_id) if result.errors else None
        if error is None and row.num_logits and token_ids is None:
            error = Failure("the step returned no token for this sequence")
        if error is not None:
            self._end(seq, "error", error=error)
            return SequenceUpdate(seq, finish_reason="error", error=error)
        start, end = row.num_computed, row.num_computed + num_completed
        if start < seq.num_prompt:
            self._counters.computed_prompt_tokens += min(end, seq.num_prompt) - start
        if seq.prompt_logprobs is not None:
            keep_prompt_logprobs(seq, start, result.prompt_logprobs.get(seq.seq_id, []))
        if seq.routed_experts is not None:
            seq.routed_experts.put(start, row.num_tokens, result.routed_experts.get(seq.seq_id, b""))
        update, stop = None, None
        if token_ids:
            if seq.first_token_at is None:
                seq.first_token_at = self._clock()
            update, stop = collect_tokens(seq, token_ids, result.logprobs.get(seq.seq_id) if result.logprobs else None)
            self._counters.generation_tokens += len(update.token_ids)
        elif seq.pooled and end == seq.num_prompt:
            update, stop = collect_pooled(seq, result.pooled.get(seq.seq_id))
        if seq.seq_id in result.sparse:
            self._sparse.collected(seq, start, end, result.sparse[seq.seq_id])
        # A preempted sequence does not run again before all of its rows in flight are collected.
        if seq.status is Status.RUNNING:
            self._advance(seq, num_completed, row.num_logits - len(token_ids or ()))
        if update is not None and stop is not None:
            self._end(seq, stop.reason, stop.stop_reason, stop.error)
            update.finish_reason, update.stop_reason, update.hides_last, update.error = stop
        return update

    def _advance(self, seq: Sequence, num_completed: int, num_rejected: int) -> None:
        """Marks a row's tokens as cached, except the last ``num_rejected``, which are to be computed again."""
        seq.drafts = ()
        seq.num_computed -= num_rejected
        seq.num_collected = collected = seq.num_collected + num_completed - num_rejected
        known = len(seq.token_ids)
        self.kv.advance(seq.blocks, collected if collected < known else known)
        if seq.siblings and seq.num_collected >= seq.num_prompt:
            self._fork_siblings(seq)

    def _make_sequence(self, request: Request, index: int, first: Sequence | None = None) -> Sequence:
        seq_id = self._next_seq_id
        self._next_seq_id += 1
        sparse = self._sparse.prompt(request)
        identity = request.cache_identity
        if sparse is not None:
            identity = dataclasses.replace(identity, attention_mode=sparse.config.name, sparse=sparse.identity)
        blocks = self.kv.open(seq_id, request.prompt_token_ids.copy(), identity)
        return Sequence(seq_id, request, index, blocks, self.config.max_model_len, first, sparse, versions=[(0, self._weights)])

    def _lead(self, seq: Sequence, siblings: list[Sequence]) -> None:
        """Queues a sequence. Its siblings wait outside the queue until it has computed the prompt."""
        seq.siblings = siblings
        self._waiting.add(seq)

    def _fork_siblings(self, seq: Sequence) -> None:
        """The prompt is computed: its samples share its full blocks and join the queue."""
        boundary = self.kv.fork_boundary(seq.blocks, seq.num_prompt)
        siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            share_prompt(self.kv, seq, sibling, boundary)
            self._waiting.add(sibling)
        seq.blocks.keep_from = None
        if self.kv.states is not None:
            self.kv.states.end_fork(seq.blocks)

    def _end(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None, error: Failure | None = None
    ) -> None:
        """Ends a sequence in any state; no-op if it has finished."""
        if seq.status is Status.FINISHED:
            return
        self._leave_queues(seq, reason)
        seq.status = Status.FINISHED
        seq.finish_reason, seq.stop_reason, seq.error = reason, stop_reason, error
        seq.finished_at = self._clock()
        seq.matcher = None
        self._num_unfinished -= 1
        self._counters.finished[reason] = self._counters.finished.get(reason, 0) + 1
        alive = self._requests[seq.request.request_id]
        alive.remove(seq)
        if not alive:
            del self._requests[seq.request.request_id]
        if seq.siblings:
            # The prompt is not computed yet: the next sample computes it instead.
            successor, *rest = seq.siblings
            seq.siblings = []
            self._lead(successor, rest)

    def _leave_queues(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is Status.RUNNING:
            self._running.remove(seq)
            self._leave_slot(seq, reason)
        elif seq in self._waiting:
            self._waiting.remove(seq)
            self.kv.free(seq.blocks, None)
        else:
            for other in self._requests[seq.request.request_id]:
                if seq in other.siblings:
                    other.siblings.remove(seq)
        if self._starved is seq:
            self._starved = None

    def _leave_slot(self, seq: Sequence, reason: FinishReason | None) -> None:
        """Releases slot and blocks; steps in flight may still write the blocks. ``reason``: None if it is preempted."""
        if self._states is not None:
            self._states.leaves(seq, reason)
        self._sparse.leaves(seq)
        self._slots.release(seq.slot)
        self._adapters.release(seq)
        self.kv.free(seq.blocks, self._last_step if seq.num_in_flight else None)
