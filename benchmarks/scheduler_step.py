"""Host time of a decode step: ``schedule`` and ``update`` of the scheduler, without a model.

    python benchmarks/scheduler_step.py --rows 256 --kv-events zmq

Reports microseconds of processor time of this thread per step, the median over steps and their mean, for steps in which no
sequence starts or ends. Every 16th step of a sequence fills a block, which with ``--kv-events`` is reported to a router of
replicas (``router``) or published (``zmq``), as part of ``update``.
"""

from __future__ import annotations

import argparse
import statistics
import time

from headrace.config import CacheConfig, SchedulerConfig
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine.core import CacheListener
from headrace.model_spec import CacheGroup
from headrace.option_groups import KVEventsConfig
from headrace.processes.kv_events import EventPublisher, RoutingReports
from headrace.processes.messages import encode
from headrace.sampling_params import SamplingParams


def measure(rows: int, steps: int, depth: int = 1, kv_events: str = "off") -> tuple[list[int], list[int]]:
    """Nanoseconds of each ``schedule`` and of each ``update``."""
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
    listener: CacheListener | None = None
    unsent: list[bytes] = []
    if kv_events == "router":
        listener = RoutingReports(scheduler.kv, lambda message: unsent.append(encode(message)))
    elif kv_events == "zmq":
        listener = EventPublisher(KVEventsConfig(endpoint="inproc://events"), scheduler.kv)
    changes = scheduler.kv.record_changes() if listener is not None else []
    for number in range(rows):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4096)
        prompt = [number, *range(31 + number % 16)]
        scheduler.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, max_tokens=4096, seed=0))
    schedule_times, update_times, launched = [], [], []
    for _ in range(steps + 2):
        begin = time.thread_time_ns()
        plan = scheduler.schedule()
        schedule_times.append(time.thread_time_ns() - begin)
        launched.append(plan)
        if len(launched) < depth:
            continue
        oldest = launched.pop(0)
        outcome = result(oldest)
        begin = time.thread_time_ns()
        scheduler.update(oldest, outcome)
        if listener is not None and changes:
            listener.changed(changes.copy())
            changes.clear()
        update_times.append(time.thread_time_ns() - begin)
    if listener is not None:
        listener.close()
    return schedule_times[2:], update_times[2:]


def result(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, [row.seq_id for row in plan.rows], [[7] for _ in plan.rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--kv-events", choices=("off", "router", "zmq"), default="off")
    given = parser.parse_args()
    times = dict(zip(("schedule", "update"), measure(given.rows, given.steps, given.depth, given.kv_events), strict=True))
    shown = (f"{name} {statistics.median(t) / 1e3:,.0f} us (mean {statistics.mean(t) / 1e3:,.0f})" for name, t in times.items())
    print(f"{given.rows} rows: {', '.join(shown)}")


if __name__ == "__main__":
    main()
