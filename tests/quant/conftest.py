from __future__ import annotations

import pytest

from headrace.kernels.native import NativeKernels, load


@pytest.fixture(params=["native", pytest.param("x86-64-v3", marks=pytest.mark.slow), "x86-64"])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    """The native kernels, compiled for several instruction sets."""
    found = load(request.param)
    if found is None:
        pytest.skip(f"no compiler builds for {request.param} here")
    return found
