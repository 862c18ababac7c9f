"""Patches of pictures and videos, made on the encoder's device."""

from __future__ import annotations

import torch

from headrace.core.media import PatchLayout
from headrace.models.vision.interface import device_tensor


def patches_of(frames: torch.Tensor, layout: PatchLayout, dtype: torch.dtype) -> torch.Tensor:
    """The patches that the image processors of Qwen's models make, bit for bit: a value's shade is looked up, not computed.

    Args:
        frames: ``[n, height, width, 3]`` uint8, of whole merged patches.

    Returns:
        ``[temporal patches * rows * columns, 3 * frames of a patch * patch_size ** 2]``, merged patches one after the other.
    """
    side, merge, time = layout.patch_size, layout.merge_size, layout.temporal_patch_size
    shades = device_tensor(layout.shades, frames.device).to(dtype)
    places = frames.int().add_(torch.arange(0, shades.numel(), shades.shape[1], dtype=torch.int32, device=frames.device))
    pixels = shades.view(-1).index_select(0, places.view(-1)).view(frames.shape)
    if missing := -len(pixels) % time:
        pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
    _, height, width, _ = pixels.shape
    blocks = (height // (side * merge), merge, side, width // (side * merge), merge, side)
    # From [time, frame, row, row of block, y, column, column of block, x, colour].
    patches = pixels.view(-1, time, *blocks, 3).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return patches.reshape(-1, 3 * time * side * side)
