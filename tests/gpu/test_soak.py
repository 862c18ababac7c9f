"""A server's engine under random traffic, in its own process: every request is answered, nothing leaks, and what a request
gets does not depend on who else is there.

SOAK_REQUESTS says how many: 10,000 on a GPU and 200 on a CPU unless told otherwise. Whatever else runs on the GPU meanwhile
must not take memory: what leaks is seen by the device's own account.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from headrace.config import EngineArgs
from headrace.errors import RequestError
from headrace.frontend.async_llm import AsyncLLM
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams

from .conftest import CUDA
from .traffic import MAX_LEN, Asked, Traffic, check

AMOUNT = {"cpu": 200, "cuda": 10_000}
AT_ONCE = {"cpu": 48, "cuda": 256}
ROOM = {
    "cpu": {
        "num_kv_blocks": 40,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 128,
        "num_threads": 1,
        # Prompts in chunks beside others would take turns, and few sequences would be preempted.
        "max_prefill_tokens_beside_decode": 128,
    },
    "cuda": {"num_kv_blocks": 72, "max_num_seqs": 128, "max_num_batched_tokens": 512},
}
PROBES = 8
GROWTH = 256 * 2**20
"""Bytes that the engine may take more at the end than after a fifth of the requests."""


class Soak:
    """``dtype`` float32 also checks that probes, asked for again and again, get what they got alone."""

    def __init__(self, llm: AsyncLLM, count: int, at_once: int, exact: bool) -> None:
        self._llm = llm
        self._count = count
        self._gate = asyncio.Semaphore(at_once)
        self._exact = exact
        self._traffic = Traffic(11, season=max(1, count // 6))
        self._wanted: list[list[list[int]]] = []
        self._probes = [self._probe(index) for index in range(PROBES)]
        self.counts: Counter[str] = Counter()
        self.memory: list[dict[str, int]] = []
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        """Processor time of all threads of the engine's process."""

    async def run(self) -> None:
        self._wanted = [await self._tokens(probe) for probe in self._probes]
        start, busy = time.perf_counter(), self._cpu_seconds()
        early = self._count // 5
        await self._wave(early)
        self.memory.append(self._used())
        await self._wave(self._count - early)
        self.memory.append(self._used())
        self.seconds = time.perf_counter() - start
        self.cpu_seconds = self._cpu_seconds() - busy

    async def _wave(self, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(count):
                await self._gate.acquire()
                work = self._again(index % PROBES) if index % 31 == 30 else self._one(self._traffic.next())
                group.create_task(self._counted(work))

    async def _counted(self, work: Any) -> None:
        try:
            self.counts[await work] += 1
        finally:
            self._gate.release()

    async def _one(self, asked: Asked) -> str:
        """Serves one request to its fate; returns how it ended."""
        name = f"soak-{self.counts.total()}-{id(asked)}"
        prompt: Any = {"prompt_token_ids": asked.prompt}
        stream = self._llm.generate(prompt, asked.params, name, priority=asked.priority)
        output: RequestOutput | None = None
        try:
            async for output in stream:
                taken = sum(len(sample.token_ids) for sample in output.outputs)
                if asked.fate == "left" and taken >= asked.patience:
                    await stream.aclose()
                    return "left"
                if asked.fate == "aborted" and taken >= asked.patience:
                    await self._llm.abort(name)
        except RequestError:
            assert asked.fate == "refused"
            return "refused"
        assert output is not None and asked.fate != "refused", asked
        if asked.fate == "aborted" and any(sample.finish_reason == "abort" for sample in output.outputs):
            assert output.finished
            return "aborted"
        check(asked, output)
        return "served"

    def _probe(self, index: int) -> tuple[list[int], SamplingParams]:
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.0, "repetition_penalty": 1.7},
            {"temperature": 1.0, "seed": 5, "top_p": 0.9},
            {"temperature": 0.8, "seed": 6, "top_k": 30, "frequency_penalty": 1.0, "n": 2},
        ]
        prompt = [(37 * index + 11 * place * place) % 256 for place in range(3 + 7 * index)]
        return prompt, SamplingParams(max_tokens=16, ignore_eos=True, **kinds[index % len(kinds)])

    async def _tokens(self, probe: tuple[list[int], SamplingParams]) -> list[list[int]]:
        outputs = [each async for each in self._llm.generate({"prompt_token_ids": probe[0]}, probe[1])]
        output = outputs[-1]
        assert output.finished and output.error is None
        return [list(sample.token_ids) for sample in output.outputs]

    async def _again(self, index: int) -> str:
        found = await self._tokens(self._probes[index])
        if self._exact:
            assert found == self._wanted[index], f"probe {index}"
        return "probe"

    def _cpu_seconds(self) -> float:
        times = psutil.Process(self._llm.engine_pid).cpu_times()
        return float(times.user + times.system)

    def _used(self) -> dict[str, int]:
        """Bytes of the engine's process, and of the GPU in all."""
        used = {"process": psutil.Process(self._llm.engine_pid).memory_info().rss}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            used["gpu"] = total - free
        return used


async def idle(llm: AsyncLLM) -> None:
    """Streams that were left are aborted a moment later."""
    for _ in range(500):
        if llm.stats.num_running == llm.stats.num_waiting == 0 and llm.stats.kv_blocks_used == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"the engine is not idle: {llm.stats}")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), CUDA])
def test_soak(device: str, dtype: str, folder_of: Callable[[str], Path], report: Callable[[str, dict[str, Any]], None]) -> None:
    if (device, dtype) == ("cpu", "bfloat16"):
        pytest.skip("float32 says more on a CPU")
    count = int(os.environ.get("SOAK_REQUESTS", AMOUNT[device]))
    common: dict[str, Any] = {"max_model_len": MAX_LEN, "policy": "priority", "quantization": "none", "pipeline_depth": 2}
    args = EngineArgs(model=str(folder_of("llama")), device=device, dtype=dtype, **common | ROOM[device])

    async def work() -> None:
        async with AsyncLLM(args) as llm:
            pid = llm.engine_pid
            soak = Soak(llm, count, AT_ONCE[device], exact=dtype == "float32")
            await soak.run()
            await idle(llm)
            await llm.check_integrity()
            assert await llm.reset_prefix_cache(), "a block is still owned"
            stats = llm.stats
            assert llm.engine_pid == pid, "the engine was restarted"
            counts = dict(soak.counts)
            steps = max(1, stats.step)
            seconds = {name: getattr(stats, f"{name}_seconds") for name in ("forward", "sample", "host")}
            report(
                f"soak-{device}-{dtype}",
                {
                    "requests": count,
                    "ended": counts,
                    "seconds": soak.seconds,
                    "requests_per_second": count / soak.seconds,
                    "steps": stats.step,
                    "step_ms": {name: 1e3 * value / steps for name, value in seconds.items()},
                    "cpu_ms_per_step": 1e3 * soak.cpu_seconds / steps,
                    "wall_ms_per_step": 1e3 * soak.seconds / steps,
                    "preemptions": stats.num_preemptions,
                    "prefix_hit_tokens": stats.prefix_hit_tokens,
                    "generation_tokens": stats.generation_tokens,
                    "memory_bytes": soak.memory,
                    "environment": llm.info.environment,
                },
            )
            assert sum(counts.values()) == count
            for fate in ("served", "left", "aborted", "refused", "probe"):
                assert counts[fate] > 0, counts
            assert stats.num_preemptions > count // 40 and stats.prefix_hit_tokens > 0
            before, after = soak.memory
            assert all(after[name] - before[name] < GROWTH for name in after), soak.memory

    asyncio.run(asyncio.wait_for(work(), 1100))
