"""Drives a scheduler with the oracle runner, one event at a time."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

import msgspec

from headrace.config import CacheConfig, SchedulerConfig
from headrace.core.plan import SamplePlan, StepPlan, StepResult, decode_plan, encode_plan
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Sequence, SequenceUpdate, Status
from headrace.kv import Item
from headrace.model_spec import CacheGroup, StateGroup, StatePlane
from headrace.outputs import Failure, TokenLogprobs
from headrace.sampling_params import SamplingParams
from support.cache_config import cache_holding
from support.core.oracle_runner import EOS, VOCAB, OracleRunner, expected_outputs, expected_prompt_logprobs


def make_cache(
    num_blocks: int | tuple[int, ...] = 64,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    caching: bool = True,
    widths: tuple[int, ...] | None = None,
    states: tuple[int, int, int] | None = None,
) -> CacheConfig:
    """Takes as much memory as the given blocks of each group, null block included; ``widths`` are bytes a token.

    ``states``: multiples of 16 bytes of a state block, number of these, and how many may be snapshots.
    """
    counts = (num_blocks,) * len(windows) if isinstance(num_blocks, int) else num_blocks
    widths = (1,) * len(windows) if widths is None else widths
    groups = tuple(CacheGroup(i, window, (i,), width) for i, (window, width) in enumerate(zip(windows, widths, strict=True)))
    held, group, snapshots = [count - 1 for count in counts], None, 0
    if states is not None:
        size, count, snapshots = states
        held.append(count)
        group = StateGroup(((StatePlane("state", (size, 4), "float32"),),))
    return cache_holding(
        held,
        block_size=block_size,
        groups=groups,
        enable_prefix_caching=caching,
        dtype="float32",
        states=group,
        snapshots=snapshots,
        state_grid=4,
    )


def make_config(**changes: object) -> SchedulerConfig:
    default = SchedulerConfig(
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, max_queue_len=64, policy="fcfs", pipeline_depth=1
    )
    return dataclasses.replace(default, **changes)


def item(start: int, end: int, content_hash: str = "cat", *, atomic: bool = True, encoder_tokens: int = 0) -> Item:
    """An atomic one is bidirectional."""
    return Item(start, end, atomic, atomic, content_hash, encoder_tokens)


def make_request(name: str, prompt: list[int], max_tokens: int = 4, **fields: object) -> Request:
    """Keyword arguments that SamplingParams knows go there, the others to the request."""
    params = {key: fields.pop(key) for key in list(fields) if key in SamplingParams.__struct_fields__ and key != "seed"}
    params.setdefault("ignore_eos", "eos_token_ids" not in fields)
    defaults = {"seed": sum(prompt) + len(prompt), "eos_token_ids": [EOS]}
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**params),
        max_tokens=max_tokens,
        **(defaults | fields),
    )


@dataclasses.dataclass
class Outcome:
    """Output of one sequence as a client got it."""

    request: Request
    index: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    reason: str | None = None
    error: Failure | None = None


class World:
    """Scheduler, runner and clients. Every event is followed by an integrity check."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        self.config = config
        self.cache = cache
        self.now = 0.0
        self.scheduler = Scheduler(config, cache, clock=lambda: self.now)
        self.requests: dict[int, Request] = {}
        self.errors: dict[int, int] = {}
        self.runner = OracleRunner(config, cache, self.requests, self.errors)
        self.outcomes: dict[int, Outcome] = {}
        self.host_stops: dict[int, int] = {}
        """seq_id -> number of outputs after which the host finds a stop string."""
        self.launched: deque[StepPlan] = deque()
        self.recording: list[bytes | StepResult] = []
        self.sequences: list[Sequence] = []
        self.num_drafts = 0
        self._expected: dict[int, list[int]] = {}
        self.seconds: Callable[[StepPlan], float] = lambda plan: 0.0
        """Returns the seconds that a step takes, for its result."""

    def add(self, request: Request) -> list[Sequence]:
        sequences = self.add_unchecked(request)
        self.scheduler.check_integrity()
        return sequences

    def add_unchecked(self, request: Request) -> list[Sequence]:
        sequences = self.scheduler.add(request)
        self.sequences += sequences
        for seq in sequences:
            self.requests[seq.seq_id] = request
            self.outcomes[seq.seq_id] = Outcome(request, seq.index)
        return sequences

    def abort(self, request_id: str) -> list[Sequence]:
        ended = self.scheduler.abort(request_id)
        for seq in ended:
            self.outcomes[seq.seq_id].reason = "abort"
            self.assert_owns_nothing(seq)
        self.scheduler.check_integrity()
        return ended

    def assert_owns_nothing(self, seq: Sequence) -> None:
        states = self.scheduler.kv.states
        for pool in (*self.scheduler.kv.pools, *([] if states is None else [states.pool])):
            assert not any(seq.seq_id in pool.owners(block) for block in pool.blocks)

    def launch(self) -> StepPlan | None:
        if self.config.decode_tokens > 1:
            self.propose()
        plan = self.scheduler.schedule()
        if plan is not None:
            self.num_drafts += sum(len(row.drafts) for row in plan.rows)
            data = encode_plan(plan)
            assert decode_plan(data) == plan
            self.recording.append(data)
            self.runner.sample(self.runner.execute(plan), SamplePlan(plan.step))
            self.launched.append(plan)
        self.scheduler.check_integrity()
        return plan

    def propose(self) -> None:
        """Drafts for every sequence that can have some: more or fewer, right up to a place that differs from time to time."""
        for seq in self.sequences:
            if seq.status is not Status.RUNNING or not seq.decoding or seq.num_placeholders:
                continue
            if seq.seq_id not in self._expected:
                self._expected[seq.seq_id], _ = expected_outputs(seq.request, seq.index, self.config.max_model_len)
            turn = seq.seq_id + 7 * len(seq.token_ids)
            count = turn % self.config.decode_tokens
            right = self._expected[seq.seq_id][seq.num_outputs :][: turn // 3 % (count + 1)]
            self.scheduler.propose(seq, tuple([*right, *[turn % VOCAB] * count][:count]))

    def collect(self) -> list[SequenceUpdate]:
        self.now += 1.0
        plan = self.launched.popleft()
        result = self.runner.collect(plan.step)
        self.recording.append(result)
        updates = self.scheduler.update(plan, msgspec.structs.replace(result, forward_seconds=self.seconds(plan)))
        for update in updates:
            self._take(update)
        self.scheduler.check_integrity()
        return updates

    def step(self) -> list[SequenceUpdate]:
        """Fills the pipeline and collects one step."""
        while self.launch() is not None:
            pass
        return self.collect() if self.launched else []

    def run(self, max_steps: int = 2000) -> None:
        """Runs until nothing is left to do; more than ``max_steps`` steps count as starvation."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            before = len(self.recording)
            self.step()
            assert len(self.recording) > before, "work is left, but nothing can be launched"
        raise AssertionError(f"not done after {max_steps} steps")

    def _take(self, update: SequenceUpdate) -> None:
        outcome = self.outcomes[update.seq.seq_id]
        assert outcome.reason is None, "an update after the end"
        outcome.tokens.extend(update.token_ids)
        outcome.logprobs.extend(update.logprobs or [])
        if update.prompt_logprobs is not None:
            assert outcome.prompt_logprobs is None, "prompt logprobs came twice"
            outcome.prompt_logprobs = update.prompt_logprobs
        outcome.reason, outcome.error = update.finish_reason, update.error
        limit = self.host_stops.get(update.seq.seq_id)
        if outcome.reason is None and limit is not None and len(outcome.tokens) >= limit:
            self.scheduler.finish(update.seq, "stop", "host")
            outcome.reason = "stop"
        if outcome.reason is not None:
            assert update.seq.finished
            self.assert_owns_nothing(update.seq)

    def assert_right(self) -> None:
        """Nothing is left, everybody got what they had to get, and a replay gives the same."""
        self.scheduler.check_integrity()
        assert not self.scheduler.has_work()
        assert self.scheduler.kv.num_used == 0
        for seq_id, outcome in self.outcomes.items():
            self._assert_outcome(seq_id, outcome)
        stats = self.scheduler.stats()
        assert stats.generation_tokens >= sum(len(outcome.tokens) for outcome in self.outcomes.values())
        assert sum(stats.finished.values()) == len(self.outcomes)
        assert stats.kv_blocks_moved == self.runner.num_moves
        self.assert_replay()

    def _assert_outcome(self, seq_id: int, outcome: Outcome) -> None:
        request = outcome.request
        tokens, reason = expected_outputs(request, outcome.index, self.config.max_model_len)
        host_stop = self.host_stops.get(seq_id)
        if host_stop is not None and host_stop < len(tokens):
            # The last row may bring drafts behind the token at which the host stops.
            kept = min(max(host_stop, len(outcome.tokens)), host_stop + self.config.decode_tokens - 1)
            tokens, reason = (tokens[:kept], "stop") if kept < len(tokens) else (tokens, reason)
        assert outcome.reason is not None, f"sequence {seq_id} never finished"
        if outcome.reason in ("abort", "error"):
            assert outcome.tokens == tokens[: len(outcome.tokens)]
            if outcome.reason == "error" and outcome.error != Failure("injected"):
                length = len(request.prompt_token_ids) + len(outcome.tokens)
                # What comes again after a preemption needs room for a chunk.
                least = max(1, self.cache.state_grid)
                assert self.scheduler.kv.too_small_for(length, least), f"{outcome.error}, but {length} tokens do fit"
            return
        assert (outcome.tokens, outcome.reason) == (tokens, reason)
        if request.sampling.prompt_logprobs is not None and outcome.index == 0:
            assert outcome.prompt_logprobs == expected_prompt_logprobs(request)
        else:
            assert outcome.prompt_logprobs is None
        if request.sampling.logprobs is not None:
            num_prompt = len(request.prompt_token_ids)
            assert outcome.logprobs == [TokenLogprobs([t], [-float(num_prompt + i)], 1) for i, t in enumerate(tokens)]

    def assert_replay(self) -> None:
        """The recorded plans, on a fresh runner, bring the recorded results."""
        fresh = OracleRunner(self.config, self.cache, self.requests, self.errors)
        steps: deque[int] = deque()
        for event in self.recording:
            if isinstance(event, bytes):
                plan = decode_plan(event)
                assert isinstance(plan, StepPlan)
                steps.append(fresh.execute(plan))
            else:
                assert fresh.collect(steps.popleft()) == event
