"""A runner without a model, and an engine around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.config import SchedulerConfig
from headrace.core.plan import GraphCount, NewSequence, SamplePlan, StepPlan, StepResult
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.outputs import OutputProcessor
from headrace.model_spec import CacheGroup
from headrace.outputs import Failure, TokenLogprobs
from headrace.text.tokenizer import Tokenizer
from support.cache_config import cache_holding
from support.engine.clock import RealTime

VOCAB, CONTEXT, BLOCK = 272, 256, 8
SCRIPT = "The mill wheel turns: wörld € 🙂 and so on. ".encode()
"""Text of every sequence, over and over; sample i begins at its i-th byte."""


def said(index: int, count: int) -> bytes:
    return bytes(SCRIPT[(index + place) % len(SCRIPT)] for place in range(count))


Handle = tuple[StepPlan, StepResult, float]
"""A plan, its result, and when it has ended."""


class FakeRunner:
    """An executor that says the script. Knows no more than the plans tell, as the real one.

    Args:
        seconds: of each step, or of a plan; steps run one after the other, and ``collect`` sleeps until one has ended.
    """

    def __init__(self, seconds: float | Callable[[StepPlan], float] = 0.0, clock: RealTime | None = None) -> None:
        self._seconds = seconds
        self._clock = clock or RealTime()
        self._free = 0.0
        """When the last step ends."""
        self.plans: list[StepPlan] = []
        self.broken: dict[int, str] = {}
        """seq_id -> error to report."""
        self._slots: dict[int, NewSequence] = {}
        self._lengths: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> Handle:
        seconds = self._seconds(plan) if callable(self._seconds) else self._seconds
        self._free = max(self._free, self._clock.now()) + seconds
        self.plans.append(plan)
        for slot in plan.released:
            del self._slots[slot]
        for new in plan.new:
            assert new.slot not in self._slots, "a slot was given away twice"
            self._slots[new.slot] = new
            self._lengths[new.slot] = len(new.token_ids)
        result = StepResult(plan.step, [], [], {}, {}, {}, seconds, 0.0, len(plan.rows) > 1, len(plan.rows) - 1)
        for row in plan.rows:
            new = self._slots[row.slot]
            assert new.seq_id == row.seq_id
            if new.sampling.prompt_logprobs is not None:
                end = min(row.num_computed + row.num_tokens, new.prompt_len - 1)
                entries = [
                    logprob(new.token_ids[place + 1], new.sampling.prompt_logprobs) for place in range(row.num_computed, end)
                ]
                result.prompt_logprobs[row.seq_id] = entries
            if row.seq_id in self.broken:
                result.errors[row.seq_id] = Failure(self.broken[row.seq_id])
            elif row.num_logits:
                token = SCRIPT[(new.sample_index + self._lengths[row.slot] - new.prompt_len) % len(SCRIPT)]
                self._lengths[row.slot] += 1
                result.seq_ids.append(row.seq_id)
                result.token_ids.append([token])
                if new.sampling.logprobs is not None:
                    result.logprobs[row.seq_id] = [logprob(token, new.sampling.logprobs)]
        return plan, result, self._free

    def sample(self, handle: Handle, plan: SamplePlan) -> None:
        assert plan.step == handle[0].step

    def collect(self, handle: Handle) -> StepResult:
        _, result, end = handle
        if (wait := end - self._clock.now()) > 0.0:
            self._clock.sleep(wait)
        return result

    def capture_next(self) -> GraphCount:
        return self.graphs()

    def graphs(self) -> GraphCount:
        return GraphCount(0, 0)

    def sentinels(self) -> tuple[int, ...]:
        return ()

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def logprob(token: int, count: int) -> TokenLogprobs:
    """The token, of rank 7, and the ``count`` best, which are tokens 32, 33, ..."""
    return TokenLogprobs([token, *range(32, 32 + count)], [-3.0] + [-0.1 * (place + 1) for place in range(count)], 7)


def fake_process(mode: str = "fine", seconds: float = 0.0) -> tuple[str, ...]:
    """The command of an engine's process over a :class:`FakeRunner`, whose steps take so many seconds."""
    return sys.executable, str(Path(__file__).with_name("fake_process.py")), mode, str(seconds)


def make_core(
    tokenizer: Tokenizer | None,
    *,
    depth: int = 1,
    interval: int = 1,
    seconds: float = 0.0,
    num_blocks: int = 512,
    **limits: Any,
) -> EngineCore:
    numbers = {"max_model_len": CONTEXT, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_queue_len": 128} | limits
    group = CacheGroup(0, None, (0,), 64)
    cache = cache_holding([num_blocks - 1], block_size=BLOCK, groups=(group,), enable_prefix_caching=True, dtype="float32")
    scheduler = Scheduler(SchedulerConfig(policy="fcfs", pipeline_depth=depth, **numbers), cache)
    return EngineCore(scheduler, FakeRunner(seconds), OutputProcessor(tokenizer, interval), pipeline_depth=depth)
