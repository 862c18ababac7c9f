"""Ranks as processes of a server's engine: lost or stopped, everything in flight is answered and the engine comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from support.models.tiny_llama import write_config

from headrace import AsyncLLM, SamplingParams
from headrace.config import EngineArgs
from headrace.errors import EngineError
from headrace.outputs import RequestOutput
from headrace.processes.load import load_engine
from headrace.startup.source import FileSource

pytestmark = pytest.mark.slow
ENDLESS = SamplingParams(max_tokens=200, ignore_eos=True)
FIXED = SamplingParams(max_tokens=12, seed=3, logprobs=1, ignore_eos=True)
PATIENCE = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("processes"), max_position_embeddings=4096)


def args_of(folder: Path, **changes: object) -> EngineArgs:
    values = {"num_kv_blocks": 400, "num_threads": 1, "max_num_batched_tokens": 64, "tensor_parallel_size": 2}
    return EngineArgs(model=str(folder), load_format="dummy", device="cpu", **values | changes)


def ranks_of(pid: int) -> list[psutil.Process]:
    """The rank processes of an engine process, by rank."""
    children = [child for child in psutil.Process(pid).children() if "headrace.processes.rank" in child.cmdline()]
    return sorted(children, key=lambda child: child.pid)


async def gone(processes: list[psutil.Process], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):
        assert time.monotonic() < end, "a process is left"
        await asyncio.sleep(0.05)


async def rest(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


async def tokens(llm: AsyncLLM) -> list[int]:
    return (await rest(llm.generate("hello", FIXED))).outputs[0].token_ids


async def healthy(llm: AsyncLLM, wanted: bool) -> None:
    while llm.health().ok is not wanted:
        await asyncio.sleep(0.02)


def test_a_killed_rank_in_idle_prefill_and_decode(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with AsyncLLM(args_of(folder)) as llm:
            first = await tokens(llm)
            # Idle.
            processes = ranks_of(llm.engine_pid or 0)
            assert len(processes) == 2
            processes[1].kill()
            begin = time.monotonic()
            await healthy(llm, False)
            assert time.monotonic() - begin < 15
            assert "rank 1 ended with signal 9" in llm.health().reason
            await healthy(llm, True)
            await gone(processes)
            assert await tokens(llm) == first
            # In a prefill of many steps.
            processes = ranks_of(llm.engine_pid or 0)
            stream = llm.generate({"prompt_token_ids": [7] * 4000}, SamplingParams(max_tokens=3))
            task = asyncio.ensure_future(rest(stream))
            await asyncio.sleep(0.1)
            processes[0].kill()
            assert (await task).outputs[0].finish_reason == "error"
            await healthy(llm, True)
            await gone(processes)
            # While decoding.
            processes = ranks_of(llm.engine_pid or 0)
            streams = [llm.generate(f"prompt {i}", ENDLESS) for i in range(4)]
            await asyncio.gather(*map(anext, streams))
            processes[1].kill()
            ends = await asyncio.gather(*map(rest, streams))
            assert {output.outputs[0].finish_reason for output in ends} == {"error"}
            await healthy(llm, True)
            assert await tokens(llm) == first
            last = ranks_of(llm.engine_pid or 0)
        await gone([*processes, *last])

    asyncio.run(asyncio.wait_for(work(), PATIENCE))
    assert "rank 1 ended with signal 9" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_stopped_rank_and_a_killed_engine(folder: Path) -> None:
    async def work() -> None:
        async with AsyncLLM(args_of(folder)) as llm:
            first, processes = await tokens(llm), ranks_of(llm.engine_pid or 0)
            stream = llm.generate("prompt", ENDLESS)
            await anext(stream)
            processes[1].send_signal(signal.SIGSTOP)
            assert (await rest(stream)).outputs[0].finish_reason == "error"
            await healthy(llm, False)
            assert "rank 1 was stopped by a signal" in llm.health().reason
            await healthy(llm, True)
            await gone(processes)
            # While nothing is asked of it.
            processes = ranks_of(llm.engine_pid or 0)
            processes[0].send_signal(signal.SIGSTOP)
            await healthy(llm, False)
            assert "rank 0 was stopped by a signal" in llm.health().reason
            await healthy(llm, True)
            await gone(processes)
            processes = ranks_of(llm.engine_pid or 0)
            processes[0].send_signal(signal.SIGSTOP)
            os.kill(llm.engine_pid or 0, signal.SIGKILL)
            await gone(processes)
            await healthy(llm, False)
            await healthy(llm, True)
            assert await tokens(llm) == first

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


SCRIPT = """
import os, sys
from headrace import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", device="cpu", num_kv_blocks=64, num_threads=1, tensor_parallel_size=2)
print(llm.generate(["hello"], SamplingParams(max_tokens=3, temperature=0))[0].outputs[0].token_ids, flush=True)
print(*(rank.pid for rank in llm._engine.executor.ranks), flush=True)
sys.stdin.readline()
"""


def script(folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A script without ``if __name__ == "__main__"`` and its ranks, once it has generated."""
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert len(json.loads(process.stdout.readline())) == 3
    return process, [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "end",
    [lambda p: p.kill(), lambda p: p.send_signal(signal.SIGINT), lambda p: p.communicate("\n")],
    ids=["killed", "interrupted", "done"],
)
def test_a_script_leaves_no_process(folder: Path, end: Callable[[subprocess.Popen[str]], object]) -> None:
    process, ranks = script(folder)
    end(process)
    process.wait(30)
    asyncio.run(gone(ranks))


def test_a_front_that_is_killed_leaves_no_process(folder: Path) -> None:
    code = """
import asyncio, sys
from headrace import AsyncLLM
from headrace.config import EngineArgs
async def main():
    args = EngineArgs(model=sys.argv[1], load_format="dummy", device="cpu", num_threads=1, tensor_parallel_size=2)
    async with AsyncLLM(args) as llm:
        print(llm.engine_pid, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    front = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True, env=environment)
    assert front.stdout is not None
    engine = psutil.Process(int(front.stdout.readline()))
    left = [engine, *ranks_of(engine.pid)]
    assert len(left) == 3
    front.kill()
    front.wait(30)
    asyncio.run(gone(left))


@pytest.mark.parametrize(
    ("number", "named"),
    [(signal.SIGKILL, "rank 1 ended with signal 9"), (signal.SIGSTOP, "rank 1 was stopped by a signal")],
    ids=["killed", "stopped"],
)
def test_a_rank_that_is_lost_while_it_loads_ends_the_others(folder: Path, number: signal.Signals, named: str) -> None:
    before = {child.pid for child in psutil.Process().children()}
    ended: list[psutil.Process] = []

    def lose() -> None:
        while len(ended) < 2:
            ended[:] = [child for child in psutil.Process().children() if child.pid not in before]
            time.sleep(0.01)
        time.sleep(1.0)
        ended[1].send_signal(number)

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(EngineError, match=named):
        load_engine(FileSource(args_of(folder)))
    thread.join()
    asyncio.run(gone(ended))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_does_not_hold_up_the_end(folder: Path, number: signal.Signals) -> None:
    before = {child.pid for child in psutil.Process().children()}
    engine = load_engine(FileSource(args_of(folder)))
    ranks = [child for child in psutil.Process().children() if child.pid not in before]
    assert len(ranks) == 2
    ranks[0].send_signal(number)
    begin = time.monotonic()
    engine.core.close()
    assert time.monotonic() - begin < 60, "the rank was waited for"
    asyncio.run(gone(ranks))
