"""An engine's process whose steps take the times of a model: ``sleeping_process.py FACTOR``."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from headrace.config import EngineArgs
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.info import EngineInfo
from headrace.engine.outputs import OutputProcessor
from headrace.engine.timeline import Timeline
from headrace.host.parent import run
from headrace.processes.process import serve
from support.sim.examples import SHAPE, RealTime, SleepingExecutor, slower

factor = float(sys.argv[1])


def load(args: EngineArgs, timeline: Timeline) -> tuple[EngineCore, EngineInfo]:
    scheduler, cache = SHAPE.scheduler(), SHAPE.cache()
    depth = scheduler.pipeline_depth
    core = EngineCore(
        Scheduler(scheduler, cache), SleepingExecutor(slower(factor), RealTime()), OutputProcessor(None), pipeline_depth=depth
    )
    info = EngineInfo(
        model="sleeping",
        architecture="Sleeping",
        vocab_size=272,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        block_size=cache.block_size,
        num_blocks=list(cache.num_blocks),
        dtype="float32",
        quantization="none",
        device="cpu",
        timeline=[],
        memory=[],
        layers=[],
        decisions=[],
    )
    return core, info


run(functools.partial(serve, load))
