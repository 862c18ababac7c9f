"""Routing of attention heads by a prompt's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.kernels import gpu
from headrace.kernels.head_routing import reference
from headrace.kernels.head_routing.reference import RouterWeights

if TYPE_CHECKING:
    from headrace.kernels.head_routing import triton as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton")

__all__ = ["RouterWeights", "pool_keys", "route"]

pool_keys = gpu.dispatch(reference.pool_keys, lambda: kernels.pool_keys)
route = gpu.dispatch(reference.route, lambda: kernels.route)
