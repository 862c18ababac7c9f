"""What an engine's process does beside its imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import EngineArgs
from headrace.processes import early
from headrace.processes.early import hints, read_weights

CODE = """
import sys
from pathlib import Path
from headrace.processes.early import begin, load_libraries
begin(["none"])
load_libraries(True)
print("torch" in sys.modules, "libtorch_cpu" in Path("/proc/self/maps").read_text())
import torch
print(torch.ones(2).sum().item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of libraries are Linux's")
def test_libraries_are_there_before_torch_is_imported() -> None:
    """Where no GPU is, none is opened, and that is no error."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["False", "True", "2.0"], done.stderr


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
