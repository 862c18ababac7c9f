"""Warming up: the first use of every kernel is slow, and should not be a user's."""

from __future__ import annotations

import time

from headrace.core.plan import NewSequence, Row, StepPlan
from headrace.errors import EngineError
from headrace.runner.runner import ModelRunner
from headrace.sampling_params import SamplingParams

_LENGTH = 32
_SEQ_ID = -2
"""Of the first of the dummies; real sequences count from 0."""
_SAMPLING = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=8, top_p=0.9))


def warm_up(runner: ModelRunner) -> float:
    """Runs a prefill and two decode steps of dummy sequences; returns the seconds it took.

    Their blocks are all the null block, to which nothing is written, so nothing is left of them: neither KV nor slot.

    Raises:
        EngineError: a slot is in use.
    """
    if not runner.slots.idle:
        raise EngineError("the runner can only be warmed up while it is idle")
    begin = time.perf_counter()
    scheduler, block_size = runner.config.scheduler, runner.config.cache.block_size
    count = min(len(_SAMPLING), scheduler.max_num_seqs)
    length = max(1, min(_LENGTH, scheduler.max_model_len - 2, scheduler.max_num_batched_tokens // count))
    new = tuple(
        NewSequence(_SEQ_ID - slot, slot, [0] * length, length, _SAMPLING[slot], 0, 0, [], None) for slot in range(count)
    )
    null = (0,) * -(-min(length + 2, scheduler.max_model_len) // block_size)
    blocks = (null,) * len(runner.config.cache.groups)
    nothing = ((),) * len(runner.config.cache.groups)
    steps = [StepPlan(0, (), new, tuple(Row(seq.seq_id, seq.slot, 0, length, True, blocks) for seq in new), 0)]
    for start in range(length, min(length + 2, scheduler.max_model_len)):
        steps.append(StepPlan(0, (), (), tuple(Row(seq.seq_id, seq.slot, start, 1, True, nothing) for seq in new), count))
    steps.append(StepPlan(0, tuple(range(count)), (), (), 0))
    for plan in steps:
        runner.collect(runner.execute(plan))
    return time.perf_counter() - begin
