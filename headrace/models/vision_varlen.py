"""Qwen's vision towers on a GPU: attention over all segments in one call, and no wait for the device.

transformers computes a segment after the other (a window, or a temporal patch: some hundred for a large picture) and asks the
device for their lengths. Here their geometry is computed on the host, whose copy of the grids it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, vision_utils

from headrace.kernels.transfer import upload

ATTENTION = "headrace_varlen_flash"
"""transformers hands segments as a whole to implementations with "flash" in their name."""
_TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_HEAD_DIM_STEP = 8

Segments = Callable[..., torch.Tensor]


def flash_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """Attention of ``[T, heads, d]`` within segments; ``ends``: ``[segments + 1]`` int32, from 0."""
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, 0.0, False, False, scale=scale
    )[0]
    return out


def use_varlen(tower: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Lets a tower compute its segments at once, if it can. Its calls then need ``geometry``."""
    config: Any = tower.config
    fits = getattr(config, "model_type", "") in _TOWERS and device.type == "cuda"
    fits = fits and torch.cuda.get_device_capability(device) >= (8, 0)
    heads = getattr(config, "num_heads", 1)
    width = getattr(config, "embed_dim", None) or config.hidden_size
    fits = fits and dtype in (torch.bfloat16, torch.float16) and width // heads % _HEAD_DIM_STEP == 0
    if fits:
        config._attn_implementation = ATTENTION
    return fits


def geometry(tower: Any, grids: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """What the tower derives from the grids ``[items, 3]``, which are on the host, as arguments of its forward."""
    merge = tower.spatial_merge_size
    ends = vision_utils.get_vision_cu_seqlens(grids)
    found: dict[str, Any] = {"position_ids": vision_utils.get_vision_position_ids(grids, merge), "cu_seqlens": ends}
    longest = {"max_seqlen": _longest(ends)}
    if hasattr(tower, "fullatt_block_indexes"):
        index, ends = vision_utils.get_vision_window_index(grids, merge, tower.window_size, tower.patch_size)
        found |= {"window_index": index, "cu_window_seqlens": ends}
        longest["max_window_seqlen"] = _longest(ends)
    if hasattr(tower, "num_grid_per_side"):
        found["interp_indices"], found["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    return {name: upload(tensor.numpy(), device) for name, tensor in found.items()} | longest


def _longest(ends: torch.Tensor) -> int:
    return int(ends.diff().max())


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: ``[1, heads, T, d]``, of which it takes ``[1, T, heads, d]``."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return flash_segments(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None


AttentionInterface.register(ATTENTION, _attend)
