"""What an engine's process does beside its imports."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from headrace.config import EngineArgs
from headrace.processes import early
from headrace.processes.early import hints, open_device, read_weights


def test_a_machine_without_a_gpu_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert not open_device()


def test_the_first_device_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Mock()
    driver.cuInit.return_value = driver.cuDevicePrimaryCtxRetain.return_value = 0
    monkeypatch.setattr("ctypes.CDLL", {"libcuda.so.1": driver}.__getitem__)
    assert open_device()
    driver.cuInit.return_value = 100
    assert not open_device()


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (EngineArgs(model="m"), ["gpu", "m"]),
        (EngineArgs(), ["gpu"]),
        (EngineArgs(model="m", load_format="dummy"), ["gpu"]),
        (EngineArgs(model="m", device="cpu"), ["none", "m"]),
        (EngineArgs(model="m", tensor_parallel_size=2), ["none", "m"]),
        (EngineArgs(model="m", data_parallel_size=2), ["none", "m"]),
    ],
)
def test_only_a_lone_process_opens_the_gpu(args: EngineArgs, wanted: list[str]) -> None:
    assert hints(args) == wanted


def test_weights_are_read_whole_if_there_is_memory_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "_CHUNK", 1000)
    for name, size in (("a.safetensors", 2500), ("b.safetensors", 1000), ("tokenizer.json", 99)):
        (tmp_path / name).write_bytes(os.urandom(size))
    assert read_weights(str(tmp_path)) == 3500
    monkeypatch.setattr(early, "_SHARE", 1e-12)
    assert read_weights(str(tmp_path)) == 0
    assert read_weights("org/model-of-a-hub") == 0
