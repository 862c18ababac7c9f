"""Writing to a paged KV cache, plain or in FP8, and copying pages out again."""

from __future__ import annotations

from headrace.kernels import gpu
from headrace.kernels.kv_cache import reference
from headrace.kernels.kv_cache.reference import FP8, dequantize, quantize

__all__ = ["FP8", "dequantize", "gather_numbers", "quantize", "reshape_and_cache"]

reshape_and_cache = gpu.dispatch(reference.reshape_and_cache)
gather_numbers = gpu.dispatch(reference.gather_numbers)
