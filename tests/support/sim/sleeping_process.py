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
from support.engine.fakes import FakeRunner
from support.engine.info import info_of
from support.sim.examples import SHAPE, slower

factor = float(sys.argv[1])


def load(args: EngineArgs, timeline: Timeline) -> tuple[EngineCore, EngineInfo]:
    cache = SHAPE.cache()
    scheduler, runner = Scheduler(SHAPE.scheduler(), cache), FakeRunner(slower(factor).device_seconds)
    core = EngineCore(scheduler, runner, OutputProcessor(None), pipeline_depth=scheduler.config.pipeline_depth)
    return core, info_of(core, block_size=cache.block_size, num_blocks=list(cache.num_blocks))


run(functools.partial(serve, load))
