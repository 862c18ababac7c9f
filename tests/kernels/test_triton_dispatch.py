"""The choice between a reference and a kernel, and modules of kernels, which are imported when they are needed."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from headrace import kernels
from headrace.kernels import gpu

PACKAGES = [
    importlib.import_module(found.name) for found in pkgutil.iter_modules(kernels.__path__, "headrace.kernels.") if found.ispkg
]
LATE = [(package, name) for package in PACKAGES for name, value in vars(package).items() if isinstance(value, gpu.Late)]


@pytest.mark.parametrize(("package", "name"), LATE, ids=[f"{package.__name__}.{name}" for package, name in LATE])
def test_modules_of_kernels_are_those_of_their_operation(package: ModuleType, name: str) -> None:
    assert re.match(rf"{package.__name__}\.(triton|cuda)", getattr(package, name).__name__)


def test_a_tensor_on_a_gpu_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = gpu.dispatch(torch.add, lambda: torch.sub)
    assert chosen(torch.tensor(3), 1) == 4
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    assert chosen(torch.tensor(3), 1) == 2


def test_a_cpu_imports_no_kernels() -> None:
    code = f"""
import importlib, sys, torch
from headrace.kernels import norm
for name in {[package.__name__ for package in PACKAGES]}:
    importlib.import_module(name)
norm.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
print([name for name in sys.modules if name.startswith("headrace.kernels.") and "triton" in name])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
