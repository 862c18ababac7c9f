"""QK-norm, rotary embedding and KV cache write in one, between a layer's fused projection and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.kernels import gpu
from headrace.kernels.qkv import reference

if TYPE_CHECKING:
    from headrace.kernels.qkv import triton as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton")

norm_rotate_and_cache = gpu.dispatch(reference.norm_rotate_and_cache, lambda: kernels.norm_rotate_and_cache)
