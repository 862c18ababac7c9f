"""Two ranks on two GPUs say what one says, with and without CUDA graphs; a lost rank is noticed on GPUs too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.tiny_llama import write_model

from headrace.errors import EngineError
from headrace.frontend.llm import LLM
from headrace.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two CUDA devices"),
]
PROMPTS: list[Any] = [{"prompt_token_ids": [7 * i % 256 for i in range(length)]} for length in (1, 9, 60, 130)]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=24, logprobs=1), SamplingParams(temperature=0.9, seed=3, max_tokens=24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks"))


def engine(folder: Path, size: int, **changes: Any) -> LLM:
    values = {"dtype": "float32", "num_kv_blocks": 200, "tensor_parallel_size": size, "wait_for_kernels": True}
    return LLM(str(folder), device="cuda", **values | changes)


def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    outputs = llm.generate(PROMPTS * 2, [params for params in PARAMS for _ in PROMPTS])
    samples = [output.outputs[0] for output in outputs]
    return [
        (
            sample.token_ids,
            [entry[token].logprob for entry, token in zip(sample.logprobs or [], sample.token_ids, strict=False)],
        )
        for sample in samples
    ]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[list[tuple[list[int], list[float]]]]:
    with engine(folder, 1) as llm:
        yield answers(llm)


@pytest.mark.parametrize("changes", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=["graphs", "eager", "ordered"])
def test_two_gpus_say_what_one_says(folder: Path, expected: list[tuple[list[int], list[float]]], changes: dict) -> None:
    with engine(folder, 2, **changes) as llm:
        found = answers(llm)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        for (_, ours), (_, theirs) in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)
        assert (llm.stats.replayed_steps > 0) is ("enforce_eager" not in changes)


def test_a_killed_rank_ends_the_engine(folder: Path) -> None:
    with engine(folder, 2, enforce_eager=True) as llm:
        processes = llm._engine.executor.processes
        os.kill(processes[1].pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1 ended with signal 9"):
            llm.generate(PROMPTS, PARAMS[0])
    assert all(process.returncode is not None for process in processes)
