"""Programmatic dependent launch: a kernel's programs take their places while the kernel before still runs.

Every kernel that is launched so waits, in each of its programs, for the one before to be complete before it reads or
writes anything that another kernel has to do with. As all do, "the one before" stands for all before it.
See the CUDA programming guide, "Programmatic Dependent Launch and Synchronization".
"""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels import support

MIN_SM = 90


@triton.jit
def begin(PDL: tl.constexpr):
    """At the top of a kernel that has nothing to do before the one before is complete."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def announce(PDL: tl.constexpr):
    """The next kernel may take its places. Before ``wait``, a kernel may read what no kernel writes, such as weights."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Until the kernels before are complete, and what they wrote can be seen."""
    if PDL:
        gdc_wait()


@functools.cache
def options(device: torch.device) -> dict[str, bool]:
    """Keywords of a launch: ``PDL`` for the kernel, and the launch's own where the device can."""
    capability = support.compute_capability(device)
    able = not support.interpreted() and capability is not None and capability >= MIN_SM
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
