"""Latency: one request at a time through the engine, including its process boundary."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.bench.report import facts, load_average
from headrace.bench.workloads import Workload
from headrace.errors import EngineError
from headrace.metrics.exchanges import Exchange, totals
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.frontend.async_llm import AsyncLLM


async def run(llm: AsyncLLM, load: Workload, *, warm_up: int, repetitions: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Runs every prompt ``repetitions`` times, one after the other, after ``warm_up`` unmeasured requests."""
    load_before = load_average()
    pairs = list(zip(load.prompts, load.output_lens, strict=True))
    for index in range(warm_up):
        tell(f"warm-up {index + 1} of {warm_up}")
        await one(llm, *pairs[index % len(pairs)], request_id=f"warm-up-{index}")
    before = llm.stats
    times: list[Exchange] = []
    for index in range(repetitions * len(pairs)):
        tell(f"request {index + 1} of {repetitions * len(pairs)}")
        times.append(await one(llm, *pairs[index % len(pairs)], request_id=f"request-{index}"))
    after = llm.stats
    seconds = {
        name: getattr(after, f"{name}_seconds") - getattr(before, f"{name}_seconds") for name in ("forward", "sample", "host")
    }
    gaps = [gap for exchange in times for gap in exchange.between_tokens]
    info = llm.info
    names = ("model", "dtype", "quantization", "device", "max_num_batched_tokens")
    return (
        {"benchmark": "latency", "workload": load.name, "requests": len(times)}
        | totals(times, "between tokens")
        | {
            "decode_rate": round(len(gaps) / sum(gaps), 2) if sum(gaps) else None,
            "engine_seconds": seconds,
            "engine": {name: getattr(info, name) for name in names},
        }
        | facts(load_before)
    )


async def one(llm: AsyncLLM, prompt: list[int], output_len: int, *, request_id: str) -> Exchange:
    """Runs one greedy request of exactly ``output_len`` tokens. Tokens that arrive together share their gap evenly."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False)
    exchange = Exchange(input_tokens=len(prompt))
    start = last = time.perf_counter()
    request = llm.inputs.request({"prompt_token_ids": prompt}, params, request_id=request_id)
    async for delta in await llm.add(request):
        now = time.perf_counter()
        if delta.error:
            raise EngineError(f"{request_id} failed: {delta.error}")
        new = len(delta.token_ids)
        if exchange.first_token is None and new:
            exchange.first_token = now - start
            exchange.between_tokens += [0.0] * (new - 1)
        else:
            exchange.between_tokens += [(now - last) / new] * new if new else []
        exchange.output_tokens += new
        last = now if new else last
    exchange.whole = time.perf_counter() - start
    return exchange
