"""CUDA devices that the replicas and their ranks take, and what the report says of one."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from support.resolving import HOPPER

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.processes.multiprocess import _environment
from headrace.startup import environment
from headrace.startup.environment import take_device


@pytest.fixture(autouse=True)
def four_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    return taken


def test_a_replica_takes_the_device_of_its_number(four_devices: list[int]) -> None:
    take_device(EngineArgs(data_parallel_size=4), 2)
    assert four_devices == [2] and os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_the_ranks_of_replicas_share_no_device(four_devices: list[int]) -> None:
    args = EngineArgs(data_parallel_size=2, tensor_parallel_size=2)
    take_device(args, 1)
    seen = [_environment(args, rank, 2)["CUDA_VISIBLE_DEVICES"].split(",") for rank in range(2)]
    assert seen == [["6", "7"], ["7", "6"]] and four_devices == []
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7,4,5", "no device is hidden"


@pytest.mark.parametrize(("replicas", "ranks"), [(5, 1), (2, 3)])
def test_too_few_devices_are_refused(replicas: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match="there are 4 CUDA devices") as caught:
        take_device(EngineArgs(data_parallel_size=replicas, tensor_parallel_size=ranks), 0)
    assert caught.value.param == "data_parallel_size"


@pytest.mark.parametrize(
    ("capability", "missing", "said"),
    [
        (80, "libnvrtc.so.13 is not installed", "Triton's"),
        (90, "", "Triton's, and those in CUDA C++"),
        (90, "libnvrtc.so.13 is not installed", "Triton's alone: libnvrtc.so.13 is not installed"),
    ],
)
def test_kernels_of_a_device(capability: int, missing: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "missing", lambda: missing)
    facts = dataclasses.replace(HOPPER, instructions=frozenset({f"sm{capability}"}))
    assert environment.describe(facts, 1)["kernels"] == said
    # What a machine that is not here has installed is not known.
    monkeypatch.setattr(environment.support, "planned", lambda: True)
    assert "not installed" not in environment.describe(facts, 1)["kernels"]
