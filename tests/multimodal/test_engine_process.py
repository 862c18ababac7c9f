"""Pictures on their way to an engine process, and back as tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.served_pictures import STEPS, generate, prompts, served

from headrace import AsyncLLM, SamplingParams
from headrace.config import EngineArgs
from headrace.outputs import RequestOutput


@pytest.mark.slow
def test_an_engine_process_gets_the_same_pictures() -> None:
    own = served("qwen2_5_vl")
    cases = list(prompts("qwen2_5_vl").values())[:3]
    expected = generate(own.llm, *cases)
    args = EngineArgs(model=str(own.folder), max_model_len=512, num_kv_blocks=200, dtype="float32", num_threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, allowed_token_ids=list(range(256)))

    async def run() -> list[list[int]]:
        async with AsyncLLM(args) as llm:
            outputs = await asyncio.gather(*(last(llm, case, str(number)) for number, case in enumerate(cases)))
            return [output.outputs[0].token_ids for output in outputs]

    async def last(llm: AsyncLLM, case: Any, name: str) -> RequestOutput:
        return [output async for output in llm.generate(case, params, name)][-1]

    assert asyncio.run(run()) == [output.outputs[0].token_ids for output in expected]
