from __future__ import annotations

from pathlib import Path

import pytest

from headrace.kernels.native import NativeKernels, load

MARCHES = {"native": "", "x86-64-v3": "avx2", "alderlake": "avx_vnni", "x86-64": ""}
"""Instruction sets that the products are written for, by compilers' names -> what a CPU must have, as the system names it."""


def compiled_for(march: str) -> NativeKernels:
    needed = MARCHES[march]
    if needed and needed not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this CPU has no {needed}")
    found = load(march)
    if found is None:
        pytest.skip(f"no compiler builds for {march} here")
    return found


@pytest.fixture(params=["native", "x86-64-v3", pytest.param("alderlake", marks=pytest.mark.slow), "x86-64"])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    """The native kernels, compiled for several instruction sets."""
    return compiled_for(request.param)
