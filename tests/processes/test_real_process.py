"""AsyncLLM around a real engine: a tiny model with random weights, in its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace import AsyncLLM, SamplingParams
from headrace.config import EngineArgs
from headrace.engine.info import Progress
from headrace.errors import ConfigError
from headrace.outputs import RequestOutput
from headrace.sampling_params import StructuredOutputsParams


async def rest(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


def thread_counts(llm: AsyncLLM) -> list[int]:
    """Threads of this process and of the engine's."""
    return [len(os.listdir(f"/proc/{pid}/task")) for pid in (os.getpid(), llm.engine_pid)]


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    return await rest(llm.generate(prompt, params))


@pytest.mark.slow
def test_serves_dies_and_serves_the_same_again(tiny_folder: Path) -> None:
    params = SamplingParams(max_tokens=20, seed=3, n=2, logprobs=1, ignore_eos=True)
    endless = SamplingParams(max_tokens=200, ignore_eos=True)

    async def work() -> None:
        seen: list[Progress] = []
        args = EngineArgs(model=str(tiny_folder), load_format="dummy", num_kv_blocks=100, num_threads=1)
        async with AsyncLLM(args, on_progress=seen.append) as llm:
            assert {"config", "weights", "cache", "warm-up"} <= {progress.phase for progress in seen}
            assert llm.info.num_blocks == [101] and "GOMP_SPINCOUNT" in llm.info.environment["waiting threads"]
            first = await collect(llm, "hello", params)
            assert [len(sample.token_ids) for sample in first.outputs] == [20, 20]
            threads = thread_counts(llm)
            constrained = SamplingParams(max_tokens=4, n=2, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
            others = [constrained, SamplingParams(max_tokens=4, bad_words=["xyz"])] * 4
            await asyncio.gather(*(collect(llm, "hello", other) for other in others))
            assert thread_counts(llm) == threads
            streams = [llm.generate(f"prompt {i}", endless) for i in range(6)]
            await asyncio.gather(*map(anext, streams))
            os.kill(llm.engine_pid or 0, signal.SIGKILL)
            ends = await asyncio.gather(*map(rest, streams))
            assert {output.outputs[0].finish_reason for output in ends} == {"error"}
            while not llm.health().ok:
                await asyncio.sleep(0.02)
            again = await collect(llm, "hello", params)
            assert [s.token_ids for s in again.outputs] == [s.token_ids for s in first.outputs]
            await llm.check_integrity()
            assert llm.stats.kv_blocks_used == 0 and llm.stats.generation_tokens == 40

    asyncio.run(asyncio.wait_for(work(), 120))


def test_what_the_engine_refuses_at_start_names_the_parameter(tiny_folder: Path) -> None:
    async def work() -> None:
        with pytest.raises(ConfigError) as caught:
            await AsyncLLM(EngineArgs(model=str(tiny_folder), load_format="dummy", max_model_len=10_000)).start()
        assert caught.value.param == "max_model_len"

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize(
    ("before", "environment", "expected"),
    [
        *((f"import headrace.{room}", {}, "GOMP_SPINCOUNT=1000") for room in ("startup", "frontend")),
        pytest.param("import headrace.parity", {}, "GOMP_SPINCOUNT=1000", marks=pytest.mark.slow),
        ("import headrace.engine", {"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY=ACTIVE"),
        ("import torch, headrace.engine", {}, "OpenMP's default"),
    ],
)
def test_waiting_threads_rest_unless_told_otherwise(before: str, environment: dict[str, str], expected: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{before}\nfrom headrace.host import wait\nprint(wait.policy())"
    out = subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=True)
    assert out.stdout.startswith(expected)
