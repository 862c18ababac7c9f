"""AsyncLLM over a process that computes nothing, for tests of its life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from support.engine.fakes import fake_process

from headrace.config import EngineArgs
from headrace.frontend.async_llm import AsyncLLM
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 240))


class Shared:
    """One engine for the tests that leave it as they found it; starting one takes seconds."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.loop = asyncio.new_event_loop()
        self.run(llm.start())

    def run(self, work: Coroutine[Any, Any, None], seconds: float = 240) -> None:
        self.loop.run_until_complete(asyncio.wait_for(work, seconds))

    def close(self) -> None:
        self.run(self.llm.close())
        self.loop.close()


def build(folder: Path, mode: str = "fine", seconds: float = 0.01, on_progress: Any = None, **args: Any) -> AsyncLLM:
    llm = AsyncLLM(EngineArgs(model=str(folder), load_format="dummy", **args), on_progress=on_progress)
    llm._supervisor._command = fake_process(mode, seconds)
    return llm


async def collect(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    outputs = [output async for output in stream]
    return outputs[-1]


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


async def idle(llm: AsyncLLM) -> None:
    """Everything that ran is gone, and the books add up."""
    await until(lambda: not llm.pending() and llm.stats.num_running == llm.stats.num_waiting == 0)
    assert llm.stats.kv_blocks_used == 0
    await llm.check_integrity()


def aborted(llm: AsyncLLM) -> int:
    return llm.stats.finished.get("abort", 0)


def params(max_tokens: int = 10, **more: Any) -> SamplingParams:
    return SamplingParams(**(GREEDY | {"max_tokens": max_tokens} | more))
