"""Routing of attention heads by a prompt's keys."""

from __future__ import annotations

from headrace.kernels import gpu
from headrace.kernels.head_routing import reference
from headrace.kernels.head_routing.reference import RouterWeights

__all__ = ["RouterWeights", "pool_keys", "route"]

pool_keys = gpu.dispatch(reference.pool_keys)
route = gpu.dispatch(reference.route)
