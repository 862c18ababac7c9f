from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.kernels.native import NativeKernels, load

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
    """As on a machine without a compiler."""
    monkeypatch.setenv("HEADRACE_NATIVE", "0")
    load.cache_clear()
    yield
    load.cache_clear()
