"""MLA from the projections to attention: norm, rotary embedding and the write to the cache in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.kernels import gpu
from headrace.kernels.mla import reference

if TYPE_CHECKING:
    from headrace.kernels.mla import triton as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton")

norm_rotate_and_cache_mla = gpu.dispatch(reference.norm_rotate_and_cache_mla, lambda: kernels.norm_rotate_and_cache_mla)
