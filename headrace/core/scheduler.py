"""Scheduler: turns requests into plans, and results into progress."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from headrace.config import CacheConfig, SchedulerConfig
from headrace.core.admission import check_request
from headrace.core.chunks import chunk_length, indivisible
from headrace.core.counters import Counters
from headrace.core.ordered import OrderedSequences
from headrace.core.plan import StepPlan, StepResult
from headrace.core.policies import make_policy, running_order, waiting_order
from headrace.core.request import Request
from headrace.core.results import collect_tokens, keep_prompt_logprobs
from headrace.core.sequence import Sequence, SequenceUpdate, Status
from headrace.core.slots import Slots
from headrace.core.step import Flight, FlightRow, StepBuilder
from headrace.errors import EngineError, RequestError
from headrace.kv import KVCacheManager
from headrace.metrics.stats import EngineStats
from headrace.outputs import FinishReason


class Scheduler:
    """Decides which sequence computes what in each step.

    One token budget serves prefill and decode. Running sequences come first, in policy order; a prompt's chunk leaves a
    token to every decoding sequence behind it. Then waiting sequences are admitted in policy order, as long as there is a
    slot, budget, and KV blocks for all their tokens. A running sequence that finds no block preempts the last running one
    by policy; if it is the last one itself, it waits. So the first by policy always gets on, and nobody loops.

    ``schedule`` may run ``pipeline_depth`` steps ahead of ``update``. Steps are collected in the order they were launched.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.kv = KVCacheManager(cache)
        policy = make_policy(config.policy)
        self._running = OrderedSequences(lambda seq: running_order(policy, seq))
        self._waiting = OrderedSequences(lambda seq: waiting_order(policy, seq))
        self._slots = Slots(config.max_num_seqs)
        self._requests: dict[str, list[Sequence]] = {}
        """Unfinished sequences by request."""
        self._num_unfinished = 0
        self._next_seq_id = 0
        self._in_flight: deque[Flight] = deque()
        self._last_step = 0
        self._failed: list[SequenceUpdate] = []
        """Sequences that failed while a step was being planned: told with the next update."""
        self._urgent: Sequence | None = None
        """A sequence whose next span did not fit in what the others left of the budget: first in the next step."""
        self._counters = Counters()
        self._clock = clock

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request; returns its ``sampling.n`` sequences, in order of their index.

        Raises:
            RequestError: it can never be served.
            QueueFullError: too many are waiting.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id!r} is being served already", "request_id")
        check_request(request, self.config, self.kv, self.num_waiting)
        sequences = [self._make_sequence(request, index) for index in range(request.sampling.n)]
        first, *siblings = sequences
        self._lead(first, siblings)
        self._requests[request.request_id] = sequences.copy()
        self._num_unfinished += len(sequences)
        return sequences

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends what is left of a request (nothing, if it has finished); returns the sequences ended."""
        sequences = self._requests.get(request_id, []).copy()
        # Siblings first: a first sample that goes would promote one of them.
        for seq in reversed(sequences):
            self._end(seq, "abort")
        return sequences

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """The host found a reason to end a sequence that the scheduler does not know of, such as a stop string."""
        self._end(seq, reason, stop_reason)

    def has_work(self) -> bool:
        """True while any sequence is unfinished, or a launched step not yet collected."""
        return bool(self._num_unfinished or self._in_flight or self._failed)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot: new, preempted, or waiting for their request's first sample."""
        return self._num_unfinished - len(self._running)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be launched before another step has been collected or a request added.

        A plan without rows only brings ``update`` the news of sequences that cannot go on.
        """
        if len(self._in_flight) >= self.config.pipeline_depth:
            return None
        step = StepBuilder(self.config.max_num_batched_tokens, sum(seq.decoding for seq in self._running), self.kv.moves)
        self._schedule_urgent(step)
        self._schedule_running(step)
        self._admit_waiting(step)
        if not step and (self._in_flight or not self._failed):
            return None
        self._last_step += 1
        self._in_flight.append(Flight(self._last_step, step.flight))
        moves = self.kv.take_moves()
        self._counters.kv_blocks_moved += len(moves)
        return step.build(self._last_step, self._slots.take_released(), moves)

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Takes in the result of the oldest launched step; returns what changed for sequences with news.

        Raises:
            EngineError: the result is not of that step.
        """
        if not self._in_flight or self._in_flight[0].step != plan.step or result.step != plan.step:
            expected = self._in_flight[0].step if self._in_flight else "none"
            raise EngineError(f"result of step {result.step} for plan {plan.step}; the oldest step in flight is {expected}")
        flight = self._in_flight.popleft()
        self.kv.collected(flight.step)
        updates, self._failed = self._failed, []
        tokens = dict(zip(result.seq_ids, result.token_ids, strict=True))
        for row in flight.rows:
            row.seq.num_in_flight -= 1
            row.seq.num_placeholders -= row.samples
            if row.seq.status is not Status.FINISHED:
                update = self._apply(row, tokens.get(row.seq.seq_id, []), result)
                if update is not None:
                    updates.append(update)
        self._counters.forward_seconds += result.forward_seconds
        self._counters.sample_seconds += result.sample_seconds
        self._counters.launched(result.replayed, result.padding_tokens)
        return updates

    # ------------------------------------------------------------------ the whole

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False if there is no prefix cache."""
        return self.kv.reset_prefix_cache()

    def bump_weight_version(self) -> int:
        """The weights have changed: no KV from before is found again. Returns the new version."""
        return self.kv.bump_weight_version()

    def stats(self) -> EngineStats:
        """Everything in EngineStats but ``host_seconds``, which the engine measures."""
        counters = self._counters
        return EngineStats(
            step=self._last_step,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_preemptions=counters.num_preemptions,
            kv_blocks_used=self.kv.num_used,
            kv_blocks_total=self.kv.num_total,
            kv_blocks_moved=counters.kv_blocks_moved,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prompt_tokens=counters.prompt_tokens,
            computed_prompt_tokens=counters.computed_prompt_tokens,
            generation_tokens=counters.generation_tokens,
            finished=dict(counters.finished),
            forward_seconds=counters.forward_seconds,
            sample_seconds=counters.sample_seconds,
            replayed_steps=counters.replayed_steps,
            eager_steps=counters.eager_steps,
            padding_tokens=counters.padding_tokens,
        )

    def check_integrity(self) -> None:
        """Raises EngineError unless blocks, slots and queues agree; with nothing left to do, every block must be free."""
        self.kv.check_integrity()
        slots = sorted(seq.slot for seq in self._running if seq.slot is not None)
        if len(set(slots)) != len(self._running) or len(slots) + self._slots.num_free != self._slots.count:
            raise EngineError(f"slots {slots} of {len(self._running)} running sequences, {self._slots.num_free} free")
        known = {seq.seq_id for sequences in self._requests.values() for seq in sequences}
        placed = [seq.seq_id for seq in (*self._running, *self._waiting)]
        placed += [sibling.seq_id for seq in (*self._running, *self._waiting) for sibling in seq.siblings]
        if len(placed) != self._num_unfinished or set(placed) != known:
            raise EngineError(f"{self._num_unfinished} unfinished sequences {sorted(known)}, but queues hold {sorted(placed)}")
        if not self.has_work() and self.kv.num_used:
            raise EngineError(f"nothing is left to do, yet {self.kv.num_used} KV blocks are in use")

    # ------------------------------------------------------------------ scheduling: running sequences

    def _schedule_urgent(self, step: StepBuilder) -> None:
        """Gives the whole budget to a sequence whose span found too little of it in the last step."""
        seq, self._urgent = self._urgent, None
        if seq is None:
            return
        reserved, step.reserved = step.reserved, 0
        if seq.status is Status.RUNNING:
            self._continue(seq, step)
        elif self._waiting and self._waiting.first is seq and self._slots.num_free:
            self._admit(seq, step)
        step.reserved = min(reserved, step.budget)

    def _schedule_running(self, step: StepBuilder) -> None:
        for seq in self._running.snapshot():
            if step.budget == 0:
                break
            if seq.status is Status.RUNNING and seq.seq_id not in step.scheduled:
                decoding = seq.decoding
                self._continue(seq, step)
                step.reserved = max(0, step.reserved - decoding)

    def _continue(self, seq: Sequence, step: StepBuilder) -> None:
        """Adds a row for a running sequence, unless it must wait."""
        if seq.num_tokens >= seq.max_len:
            return  # A step in flight brings its last token.
        if seq.decoding:
            wanted = min(seq.num_tokens - seq.num_computed, step.budget)
        else:
            wanted = self._chunk(seq, seq.num_computed, step.spendable)
        granted = self._secure_blocks(seq, wanted, step) if wanted else 0
        if granted:
            new_blocks = self.kv.allocate(seq.blocks, seq.num_computed + granted)
            if new_blocks is None:
                raise EngineError(f"{seq!r} was granted {granted} tokens without blocks for them")
            step.add_row(seq, granted, new_blocks)

    def _chunk(self, seq: Sequence, start: int, limit: int) -> int:
        """Length of a prefill chunk from ``start``. If budget stops a span, the sequence is first in the next step."""
        chunk = chunk_length(start, seq.num_tokens, limit, seq.request.spans) if limit > 0 else 0
        if chunk == 0 and self._urgent is None and indivisible(start, seq.request.spans) > max(1, limit):
            self._urgent = seq
        return chunk

    def _secure_blocks(self, seq: Sequence, wanted: int, step: StepBuilder) -> int:
        """How many of the wanted tokens can have blocks in this step, after preempting others if need be; may be 0."""
        start = seq.num_computed
        if start + wanted <= seq.blocks.capacity:
            return wanted
        while True:
            room = self.kv.room(seq.blocks, start)
            if room >= wanted:
                return wanted
            least = 1 if seq.decoding else indivisible(start, seq.request.spans)
            if room >= least:
                return chunk_length(start, start + wanted, room, seq.request.spans)
            if self.kv.room(seq.blocks, start, pending=True) >= least or not self._make_room(seq, step):
                step.short_of_blocks = True
                return 0

    def _make_room(self, seq: Sequence, step: StepBuilder) -> bool:
        """Takes blocks from someone who comes after a running sequence; False if it has to wait (or has failed)."""
        if self._drop_waiting_blocks():
            return True
        for victim in reversed(self._running):
            if victim is seq:
                break
            if victim.seq_id not in step.scheduled:
                self._preempt(victim)
                return True
        if len(self._running) == 1 and not seq.num_in_flight and not self.kv.num_pending:
            self._fail(seq)
        return False

    def _drop_waiting_blocks(self) -> bool:
        """Takes shared prompt blocks from samples that still wait; they find or compute their prompt themselves."""
        holders = [seq for seq in self._waiting if seq.blocks.capacity]
        for seq in holders:
            self.kv.free(seq.blocks, None)
        return bool(holders)

    def _preempt(self, seq: Sequence) -> None:
        """Takes slot and blocks from a running sequence. It comes back at the front of its class and is recomputed."""
        self._running.remove(seq)
        self._leave_slot(seq)
        seq.status = Status.PREEMPTED
        seq.num_computed = seq.num_collected = 0
        seq.incarnation += 1
        self._waiting.add(seq)
        self._counters.num_preemptions += 1

    def _fail(self, seq: Sequence) -> None:
        """The cache, though all of it is there for this sequence, is too small to go on."""
        reason = self.kv.too_small_for(seq.num_tokens, indivisible(seq.num_computed, seq.request.spans))
        message = f"the KV cache is too small for this sequence to go on: {reason or 'it has the whole cache already'}"
        self._end(seq, "error", error=message)
        self._failed.append(SequenceUpdate(seq, finish_reason="error", error=message))

    # ------------------------------------------------------------------ scheduling: waiting sequences

    def _admit_waiting(self, step: StepBuilder) -> None:
        while self._waiting and self._slots.num_free and step.spendable > 0 and not step.short_of_blocks:
            if not self._admit(self._waiting.first, step):
                break

    def _admit(self, seq: Sequence, step: StepBuilder) -> bool:
        """Gives the sequence at the head of the queue a slot and its first row; False if it (and those behind) must wait."""
        if seq.num_in_flight:
            return False  # Preempted lately; tokens it has sampled are still on their way.
        forked = seq.blocks.capacity > 0
        hit = None if forked else self.kv.no_hit() if seq.prompt_logprobs is not None else self.kv.match(seq.blocks)
        start = seq.blocks.capacity if hit is None else hit.num_tokens
        if not self.kv.fits(seq.blocks, hit, seq.num_tokens, indivisible(start, seq.request.spans)):
            return self._blocks_missing(seq)
        chunk = self._chunk(seq, start, step.spendable)
        if chunk == 0:
            return False
        if hit is not None:
            self.kv.attach(seq.blocks, hit)
        chunk = chunk_length(start, start + chunk, self.kv.room(seq.blocks, start), seq.request.spans)
        new_blocks = self.kv.allocate(seq.blocks, start + chunk)
        if not chunk or new_blocks is None:
            raise EngineError(f"{seq!r} was admitted without blocks for its first chunk")
        self._waiting.remove(seq)
        self._start(seq, start, first_time=seq.status is Status.WAITING, forked=forked)
        self._running.add(seq)
        step.add_new(seq)
        step.add_row(seq, chunk, new_blocks)
        return True

    def _blocks_missing(self, seq: Sequence) -> bool:
        """The head of the queue does not fit now. Returns True if that has been settled and the queue is worth another look."""
        if self._running or self._in_flight or self.kv.num_pending:
            return False
        if not self._drop_waiting_blocks():
            self._fail(seq)
        return True

    def _start(self, seq: Sequence, num_cached: int, *, first_time: bool, forked: bool) -> None:
        seq.slot = self._slots.take()
        seq.status = Status.RUNNING
        seq.prefill_len = len(seq.token_ids)
        seq.num_computed = seq.num_collected = num_cached
        if seq.siblings:
            seq.blocks.keep_from = self.kv.fork_boundary(seq.num_prompt, seq.request.spans)
        if not first_time:
            return
        seq.scheduled_at = self._clock()
        if forked or seq.index > 0:
            return
        counters = self._counters
        counters.prompt_tokens += seq.num_prompt
        if self.kv.caching and seq.prompt_logprobs is None:
            counters.prefix_query_tokens += seq.num_prompt
            counters.prefix_hit_tokens += num_cached
        seq.num_cached_tokens = num_cached
        for sibling in seq.siblings:
            sibling.num_cached_tokens = num_cached

    # ------------------------------------------------------------------ results

    def _apply(self, row: FlightRow, token_ids: list[int], result: StepResult) -> SequenceUpdate | None:
        """Takes in one row of a collected step, of a sequence that is still alive."""
        seq = row.seq
        error = result.errors.get(seq.seq_id)
        if error is None and row.samples and not token_ids:
            error = "the step returned no token for this sequence"
        if error is not None:
            self._end(seq, "error", error=error)
            return SequenceUpdate(seq, finish_reason="error", error=error)
        self._counters.computed_prompt_tokens += max(0, min(row.end, seq.num_prompt) - row.start)
        if seq.prompt_logprobs is not None:
            keep_prompt_logprobs(seq, row.start, result.prompt_logprobs.get(seq.seq_id, []))
        if row.incarnation == seq.incarnation:
            seq.num_collected = row.end
            self.kv.advance(seq.blocks, row.end)
            if seq.siblings and row.end >= seq.num_prompt:
                self._fork_siblings(seq)
        if not row.samples:
            return None
        if seq.first_token_at is None:
            seq.first_token_at = self._clock()
        update, stop = collect_tokens(seq, token_ids, result.logprobs.get(seq.seq_id))
        self._counters.generation_tokens += len(update.token_ids)
        if stop is not None:
            self._end(seq, stop.reason, stop.stop_reason)
            update.finish_reason, update.stop_reason = stop
        return update

    # ------------------------------------------------------------------ samples of one request

    def _make_sequence(self, request: Request, index: int) -> Sequence:
        seq_id = self._next_seq_id
        self._next_seq_id += 1
        blocks = self.kv.open(seq_id, request.prompt_token_ids.copy(), request.cache_salt, request.spans)
        return Sequence(seq_id, request, index, blocks, self.config.max_model_len)

    def _lead(self, seq: Sequence, siblings: list[Sequence]) -> None:
        """Queues a sequence whose siblings wait, outside the queue, until it has computed the prompt."""
        seq.siblings = siblings
        self._waiting.add(seq)

    def _fork_siblings(self, seq: Sequence) -> None:
        """The prompt is there: its samples take hold of its full blocks and queue up, in order of their arrival."""
        boundary = self.kv.fork_boundary(seq.num_prompt, seq.request.spans)
        siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            if boundary and self.kv.can_fork(seq.blocks, boundary):
                self.kv.fork(seq.blocks, sibling.blocks, boundary)
            self._waiting.add(sibling)
        seq.blocks.keep_from = None

    # ------------------------------------------------------------------ endings

    def _end(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """Ends a sequence in whatever state it is; ending twice does nothing."""
        if seq.status is Status.FINISHED:
            return
        self._leave_queues(seq)
        seq.status = Status.FINISHED
        seq.finish_reason, seq.stop_reason, seq.error = reason, stop_reason, error
        seq.finished_at = self._clock()
        self._num_unfinished -= 1
        self._counters.finished[reason] = self._counters.finished.get(reason, 0) + 1
        alive = self._requests[seq.request.request_id]
        alive.remove(seq)
        if not alive:
            del self._requests[seq.request.request_id]
        if seq.siblings:
            # It leaves before it has computed the prompt: the next sample does that in its place.
            heir, *rest = seq.siblings
            seq.siblings = []
            self._lead(heir, rest)

    def _leave_queues(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._running.remove(seq)
            self._leave_slot(seq)
        elif seq in self._waiting:
            self._waiting.remove(seq)
            self.kv.free(seq.blocks, None)
        else:
            for other in self._requests[seq.request.request_id]:
                if seq in other.siblings:
                    other.siblings.remove(seq)
        if self._urgent is seq:
            self._urgent = None

    def _leave_slot(self, seq: Sequence) -> None:
        """Gives back slot and blocks; steps in flight may still write the blocks."""
        if seq.slot is None:
            raise EngineError(f"{seq!r} runs without a slot")
        self._slots.release(seq.slot)
        seq.slot = None
        self.kv.free(seq.blocks, self._last_step if seq.num_in_flight else None)
