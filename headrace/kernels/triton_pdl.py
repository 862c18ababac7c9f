"""Programmatic dependent launch: a kernel's programs start while the previous kernel still runs.

Each program of such a kernel waits for the previous kernel to complete before it reads or writes anything that another
kernel touches. Since all kernels do, this covers all previous ones.
See the CUDA programming guide, "Programmatic Dependent Launch and Synchronization".
"""

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
    """Called at the top of a kernel that does nothing before the previous one is complete."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def announce(PDL: tl.constexpr):
    """Lets the next kernel start. Before ``wait``, a kernel may only read what no kernel writes, such as weights."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Waits until the previous kernels are complete and their writes are visible."""
    if PDL:
        gdc_wait()


@functools.cache
def options(device: torch.device) -> dict[str, bool]:
    """Launch keywords: ``PDL`` for the kernel, and ``launch_pdl`` if the device supports it."""
    capability = support.compute_capability(device)
    able = not support.interpreted() and capability is not None and capability >= MIN_SM
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
