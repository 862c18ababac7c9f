"""Latency: one request at a time through the whole engine, its process boundary included."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.bench.report import distribution, facts, load_average
from headrace.bench.workloads import Workload
from headrace.errors import EngineError
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM


@dataclasses.dataclass
class Times:
    """One request, in seconds."""

    first_token: float
    between_tokens: list[float]
    """A gap for each token after the first; tokens that arrive together share their gap evenly."""
    whole: float
    input_tokens: int
    output_tokens: int


async def run(llm: AsyncLLM, load: Workload, *, warm_up: int, repetitions: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Every prompt of the workload ``repetitions`` times, one after the other, after ``warm_up`` that do not count."""
    load_before = load_average()
    pairs = list(zip(load.prompts, load.output_lens, strict=True))
    for index in range(warm_up):
        tell(f"warm-up {index + 1} of {warm_up}")
        await one(llm, *pairs[index % len(pairs)], request_id=f"warm-up-{index}")
    before = llm.stats
    times: list[Times] = []
    for index in range(repetitions * len(pairs)):
        tell(f"request {index + 1} of {repetitions * len(pairs)}")
        times.append(await one(llm, *pairs[index % len(pairs)], request_id=f"request-{index}"))
    after = llm.stats
    seconds = {
        name: getattr(after, f"{name}_seconds") - getattr(before, f"{name}_seconds") for name in ("forward", "sample", "host")
    }
    return summary(load.name, times) | {"engine_seconds": seconds, "engine": _engine(llm)} | facts(load_before)


async def one(llm: AsyncLLM, prompt: list[int], output_len: int, *, request_id: str) -> Times:
    """One greedy request of exactly ``output_len`` tokens."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False)
    start = time.perf_counter()
    request = llm.inputs.request({"prompt_token_ids": prompt}, params, request_id=request_id)
    first = last = start
    gaps: list[float] = []
    count = 0
    async for delta in await llm.add(request):
        now = time.perf_counter()
        if delta.error:
            raise EngineError(f"{request_id} failed: {delta.error}")
        if not delta.token_ids:
            continue
        new = len(delta.token_ids)
        if count == 0:
            first = now
            gaps += [0.0] * (new - 1)
        else:
            gaps += [(now - last) / new] * new
        count, last = count + new, now
    return Times(first - start, gaps, time.perf_counter() - start, len(prompt), count)


def summary(name: str, times: list[Times]) -> dict[str, Any]:
    gaps = [gap for entry in times for gap in entry.between_tokens]
    return {
        "benchmark": "latency",
        "workload": name,
        "requests": len(times),
        "input_tokens": sum(entry.input_tokens for entry in times),
        "output_tokens": sum(entry.output_tokens for entry in times),
        "milliseconds": {
            "first token": distribution([entry.first_token for entry in times]),
            "between tokens": distribution(gaps),
            "whole request": distribution([entry.whole for entry in times]),
        },
        "decode_rate": round(len(gaps) / sum(gaps), 2) if sum(gaps) else None,
    }


def _engine(llm: AsyncLLM) -> dict[str, Any]:
    info = llm.info
    return {name: getattr(info, name) for name in ("model", "dtype", "quantization", "device", "max_num_batched_tokens")}
