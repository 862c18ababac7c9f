"""Host time of a decode step: ``schedule`` and ``update`` of the scheduler, without a model.

    python benchmarks/host_step.py --rows 256

Reports microseconds of processor time per step, the median over steps, for steps in which no sequence starts or ends.
"""

from __future__ import annotations

import argparse
import statistics
import time

from headrace.config import CacheConfig, SchedulerConfig
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.model_spec import CacheGroup
from headrace.sampling_params import SamplingParams


def measure(rows: int, steps: int, depth: int = 1) -> tuple[float, float]:
    """Median microseconds of ``schedule`` and of ``update``."""
    limits = SchedulerConfig(
        max_model_len=8192, max_num_seqs=rows, max_num_batched_tokens=16_384, max_queue_len=4096, policy="fcfs",
        pipeline_depth=depth,
    )  # fmt: skip
    cache = CacheConfig(
        block_size=16,
        groups=(CacheGroup(0, None, (0,), 1),),
        nbytes=16 * 128 * rows,
        enable_prefix_caching=True,
        dtype="float32",
    )
    scheduler = Scheduler(limits, cache)
    for number in range(rows):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4096)
        prompt = [number, *range(31)]
        scheduler.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, max_tokens=4096, seed=0))
    schedule_times, update_times, launched = [], [], []
    for _ in range(steps + 2):
        begin = time.process_time_ns()
        plan = scheduler.schedule()
        schedule_times.append(time.process_time_ns() - begin)
        launched.append(plan)
        if len(launched) < depth:
            continue
        oldest = launched.pop(0)
        outcome = result(oldest)
        begin = time.process_time_ns()
        scheduler.update(oldest, outcome)
        update_times.append(time.process_time_ns() - begin)
    return statistics.median(schedule_times[2:]) / 1e3, statistics.median(update_times[2:]) / 1e3


def result(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, [row.seq_id for row in plan.rows], [[7] for _ in plan.rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=1)
    given = parser.parse_args()
    schedule, update = measure(given.rows, given.steps, given.depth)
    print(f"{given.rows} rows: schedule {schedule:,.0f} us, update {update:,.0f} us")


if __name__ == "__main__":
    main()
