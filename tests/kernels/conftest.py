"""Tests of kernels that need Triton are left out where there is none. Interpreted ones are watched."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.kernels import cuda_launch, support
from headrace.kernels.native import NativeKernels, load

HERE = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HERE else ["*test_triton*"]
MARCHES = ["native", "x86-64-v3", "x86-64"]
"""This CPU's own instructions, those of AVX2, and none but SSE2: the three ways the products are written."""


@pytest.fixture(params=MARCHES)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    """The native kernels, compiled for several instruction sets."""
    found = load(request.param)
    if found is None:
        pytest.skip(f"no compiler builds for {request.param} here")
    return found


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretends that the machine has no compiler."""
    monkeypatch.setenv("HEADRACE_NATIVE", "0")
    load.cache_clear()
    yield
    load.cache_clear()


@pytest.fixture(autouse=True)
def no_access_out_of_bounds(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.name.startswith("test_triton") and support.interpreted():
        from .memory import Checker

        with Checker().on():
            yield
    else:
        yield


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVRTC, which PyTorch loads where it is built for CUDA, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packages = importlib.util.find_spec("nvidia")
    for folder in map(Path, (packages and packages.submodule_search_locations) or ()):
        for file in sorted(folder.glob("cu13/lib/libnvrtc*.so.*")):
            if ".alt." not in file.name:
                ctypes.CDLL(str(file))
    try:
        cuda_launch.nvrtc_version()
    except OSError as error:
        pytest.skip(str(error))
