"""Engines over models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams


def engine(folder: Path, **changes: Any) -> LLM:
    fields: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "device": "cpu",
        "dtype": "float32",
        "num_kv_blocks": 40,
        "max_model_len": 64,
        "num_threads": 1,
    }
    return LLM(model=str(folder), **fields | {"model_impl": "transformers"} | changes)


def decisions(llm: LLM) -> dict[str, tuple[str, str]]:
    return {line.name: (line.value, line.reason) for line in llm.info.decisions}


def tokens_of(llm: LLM, prompt: list[int], count: int = 6) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params)
    return list(output.outputs[0].token_ids)


def model_of(llm: LLM) -> Any:
    return llm._engine.executor.model
