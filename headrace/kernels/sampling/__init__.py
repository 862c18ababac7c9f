"""Token bitmasks over logits; sampling itself is a Triton kernel here, and plain PyTorch in ``headrace.sampling``."""

from __future__ import annotations

from headrace.kernels import gpu
from headrace.kernels.sampling import reference

apply_masks = gpu.dispatch(reference.apply_masks, "sampling.triton_mask")
