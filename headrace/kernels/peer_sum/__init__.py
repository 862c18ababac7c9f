"""Sums of small tensors over the GPUs of all ranks, in memory that each of them maps. ``parallel.peers`` calls the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.kernels import gpu

if TYPE_CHECKING:
    from headrace.kernels.peer_sum import triton as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton")

__all__ = ["kernels"]
