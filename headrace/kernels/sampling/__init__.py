"""Token bitmasks over logits; sampling itself is a Triton kernel here, and plain PyTorch in ``headrace.sampling``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.kernels import gpu
from headrace.kernels.sampling import reference

if TYPE_CHECKING:
    from headrace.kernels.sampling import triton_sample as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton_sample")

__all__ = ["apply_masks", "kernels"]

apply_masks = gpu.dispatch(reference.apply_masks, "triton_mask")
