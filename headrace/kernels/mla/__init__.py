"""MLA from the projections to attention: norm, rotary embedding and the write to the cache in one."""

from __future__ import annotations

from headrace.kernels import gpu
from headrace.kernels.mla import reference

norm_rotate_and_cache_mla = gpu.dispatch(reference.norm_rotate_and_cache_mla)
