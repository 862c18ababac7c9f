"""QK-norm, rotary embedding and KV cache write in one, between a layer's fused projection and attention."""

from __future__ import annotations

from headrace.kernels import gpu
from headrace.kernels.qkv import reference

norm_rotate_and_cache = gpu.dispatch(reference.norm_rotate_and_cache)
