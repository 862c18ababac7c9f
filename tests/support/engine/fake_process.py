"""The engine's process around the runner without a model: ``fake_process.py MODE SECONDS``.

MODE is what goes wrong: nothing, the first start ("config", "load"), or every start after the first ("once:FILE"). With
"scarce:FILE" a start fails for want of space while the file exists, with "still:FILE" it then stands still. With
"prompts" a prompt that begins with "poison" ends the process, and one that begins with "labour" computes for 2.5 s of
processor time in one step.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from headrace.config import EngineArgs
from headrace.core.plan import StepPlan
from headrace.engine.core import EngineCore
from headrace.engine.info import EngineInfo, Progress
from headrace.engine.timeline import Timeline
from headrace.errors import ConfigError
from headrace.host.parent import run
from headrace.processes.process import serve
from headrace.startup.text import load_text
from support.engine.fakes import make_core
from support.engine.info import info_of

mode, seconds = sys.argv[1], float(sys.argv[2])


def load(args: EngineArgs, timeline: Timeline) -> tuple[EngineCore, EngineInfo]:
    timeline.tell(Progress("weights", 0.5, "some"))
    if mode == "config":
        raise ConfigError("this cannot work", "dtype")
    if mode == "load":
        raise RuntimeError("out of luck")
    if mode.startswith("once:"):
        mark = Path(mode.removeprefix("once:"))
        if mark.exists():
            raise RuntimeError("only the first start works")
        mark.touch()
    if mode.startswith("scarce:") and Path(mode.removeprefix("scarce:")).exists():
        raise OSError(errno.ENOSPC, "No space left on device")
    if mode.startswith("still:") and Path(mode.removeprefix("still:")).exists():
        os.kill(os.getpid(), signal.SIGSTOP)
    tokenizer = None if args.skip_tokenizer_init else load_text(args).tokenizer
    core = make_core(tokenizer, seconds=seconds, max_queue_len=args.max_queue_len)
    if mode == "prompts":
        execute = core.executor.execute

        def obey(plan: StepPlan) -> Any:
            begins = [bytes(list(new.token_ids[:6])) for new in plan.new]
            if b"poison" in begins:
                os.kill(os.getpid(), signal.SIGSEGV)
            end = time.thread_time() + 2.5 * (b"labour" in begins)
            while time.thread_time() < end:
                pass
            return execute(plan)

        core.executor.execute = obey
    return core, info_of(core)


run(functools.partial(serve, load))
