"""The choice between a reference and a kernel, and modules of kernels, which are imported when they are needed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

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


def gate_ref(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def gate(x: torch.Tensor) -> torch.Tensor:
    return x - 1


CHOICES = {
    f"{package.__name__}.{name}": inspect.getclosurevars(choice).nonlocals
    for package in PACKAGES
    for name, choice in list(vars(package).items())
    if getattr(choice, "__code__", None) is gpu.dispatch(gate_ref).__code__
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_a_kernel_has_the_parameters_of_its_reference(choice: Mapping[str, Any]) -> None:
    """And their defaults. A kernel may have more parameters, with defaults."""
    expected = inspect.signature(choice["reference"]).parameters
    kernels = [choice["native"], None if choice["module"] is None else getattr(choice["module"], choice["name"])]
    for kernel in filter(None, kernels):
        found = inspect.signature(kernel).parameters.values()
        asked = [each for each in found if each.name in expected or each.default is each.empty]
        assert [(each.name, each.kind, each.default) for each in asked] == [
            (each.name, each.kind, each.default) for each in expected.values()
        ]


def test_a_tensor_on_a_gpu_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = gpu.dispatch(gate_ref, Path(__file__).stem)
    assert chosen(torch.tensor(3)) == 4
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    assert chosen(torch.tensor(3)) == 2


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
