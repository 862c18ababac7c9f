"""The plans of several models' engines: their memory, and why one cannot be served."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
from support.models import tiny_llama

from headrace.config import EngineArgs
from headrace.server.models import plan_worker
from headrace.server.models.plan import Planned
from headrace.startup import environment
from headrace.startup.machines import imagine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama.write_model(tmp_path_factory.mktemp("model")))


def test_a_plan_has_the_ledger_and_what_the_machine_has(model: str) -> None:
    planned = plan_worker._plan(EngineArgs(model=model, kv_cache_memory=2**20, device="cpu"))
    assert planned.info is not None and planned.refusal == ""
    assert planned.info.held_bytes == planned.info.weight_bytes + planned.info.kv_cache_bytes > 2**19
    assert 0 < planned.info.kv_cache_bytes <= 2**20 < planned.machine
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(planned), type=Planned) == planned


def test_what_a_plan_found_room_for_can_be_asked_for(model: str) -> None:
    """As a server of several models does, so that an engine is the same whatever is loaded beside it."""
    args = EngineArgs(model=model, device="cpu")
    free = plan_worker._plan(args).info
    assert free is not None
    fixed = dataclasses.replace(args, kv_cache_memory=free.kv_cache_bytes, max_model_len=free.max_model_len)
    asked = plan_worker._plan(fixed).info
    assert asked is not None and (asked.memory, asked.num_blocks) == (free.memory, free.num_blocks)
    assert asked.max_model_len == free.max_model_len == tiny_llama.CONTEXT


def test_what_cannot_be_built_is_refused(model: str, tmp_path: Path) -> None:
    for args, said, param in (
        (EngineArgs(model=str(tmp_path)), "has no", "model"),
        (EngineArgs(model=model, kv_cache_memory=2**60, device="cpu"), "are there beside the weights", "kv_cache_memory"),
        (EngineArgs(model=model, max_model_len=2**20, device="cpu"), "longer than the model's context", "max_model_len"),
    ):
        planned = plan_worker._plan(args)
        assert planned.info is None and said in planned.refusal and planned.param == param


def test_a_gpu_is_shared_by_caches_of_given_sizes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PLANNED_SM", "90")  # So that it is as before after the test.
    gpu, _ = imagine("h100")
    monkeypatch.setattr(environment, "probe", lambda device: gpu)
    whole = plan_worker._plan(EngineArgs(model=model, device="cuda"))
    assert whole.info is None and whole.refusal.startswith("kv_cache_memory must be set")
    given = plan_worker._plan(EngineArgs(model=model, device="cuda", kv_cache_memory=2**20))
    assert given.info is not None and given.info.device == "cuda"
    # The weights, the cache and what is held back; not what the GPU has beside them.
    assert given.info.held_bytes < 2**32 < sum(line.nbytes for line in given.info.memory)
    assert 0.8 * gpu.total_memory < given.machine <= 0.9 * gpu.total_memory
