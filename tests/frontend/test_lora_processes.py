"""Adapters on tensor-parallel ranks, and on replicas of which one is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.models.adapters import check_greedy, merged, write_adapter
from support.models.architectures import quiet
from support.models.tiny_llama import write_model

from headrace import LLM, LoRARequest, SamplingParams
from headrace.errors import ConfigError

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
PROMPTS: list[Any] = [{"prompt_token_ids": list(range(start, start + 30))} for start in (1, 50, 90, 140)]


def build(base: Path, **args: Any) -> LLM:
    with quiet():
        return LLM(str(base), device="cpu", num_kv_blocks=80, num_threads=1, enable_lora=True, **args)


@pytest.mark.slow
def test_ranks_have_their_parts_of_every_adapter(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    adapters = {rank: write_adapter(base, tmp_path / str(rank), seed=rank, r=rank) for rank in (4, 8, 24)}
    other = write_adapter(write_model(tmp_path / "wide", intermediate_size=256), tmp_path / "other")
    with build(base, tensor_parallel_size=2, max_loras=3, max_lora_rank=24) as llm:
        with pytest.raises(ConfigError, match="in the model is"):
            llm.load_lora(LoRARequest("other", lora_path=str(other)))
        ranks = (4, None, 24, 8)
        loras = [None if rank is None else LoRARequest(str(rank), lora_path=str(adapters[rank])) for rank in ranks]
        for output, rank in zip(llm.generate(PROMPTS, PARAMS, lora_request=loras), ranks, strict=True):
            check_greedy(merged(base, None if rank is None else adapters[rank]), output)
        llm.unload_lora("8")


@pytest.mark.slow
def test_a_replica_that_is_restarted_has_every_adapter(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "one")
    with build(base, data_parallel_size=2, dp_routing_policy="round-robin") as llm:
        lora = LoRARequest("one", lora_path=str(adapter))
        for output in llm.generate(PROMPTS, PARAMS, lora_request=lora):
            check_greedy(merged(base, adapter), output)
        replicas = llm._engine.core._llm.replicas
        # The adapter's own files may be gone by then.
        kept = adapter.rename(tmp_path / "moved")
        os.kill(replicas.status()[1].pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and (replicas.health().reason or replicas.status()[1].state != "running"):
            time.sleep(0.1)
        for output in llm.generate(PROMPTS, PARAMS, lora_request=LoRARequest("one")):
            check_greedy(merged(base, kept), output)
        assert all(status.routing.accepted >= 2 for status in replicas.status())
