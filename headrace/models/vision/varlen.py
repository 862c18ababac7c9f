"""Qwen's vision towers on a GPU: attention over all segments in one call, fused norms and MLPs, no wait for the device.

transformers computes a segment after the other (a window, or a temporal patch: some hundred for a large picture) and asks the
device for their lengths. Here their geometry is computed on the host, whose copy of the grids it comes from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import vision_utils

from headrace.kernels import support
from headrace.kernels.activation import ACTIVATIONS
from headrace.kernels.transfer import upload
from headrace.layers.norm import RMSNorm

_TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_HEAD_DIM_STEP = 8
_WIDTH_STEP = 64
"""Channels of an MLP. Matrix units need rows of 16 bytes; the 3,420 channels of Qwen2.5-VL's MLPs are none."""
_LEAST_CAPABILITY = 80
"""Lowest compute capability that PyTorch's flash attention supports."""


def flash_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """Attention of ``[T, heads, d]`` within segments; ``ends``: ``[segments + 1]`` int32, from 0."""
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, 0.0, False, False, scale=scale
    )[0]
    return out


def rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates ``[T, heads, d]`` in place by angles ``[T, d]``, whose halves are equal."""
    from headrace.kernels.rotary.triton import rotate_heads as rotate  # which needs Triton

    rotate(x, cos, sin)


def can_use_varlen(tower: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    config: Any = tower.config
    # Checkpoints name the type of their vision part as the whole model's, transformers' classes with an ending.
    kind = getattr(config, "model_type", "").removesuffix("_vision")
    if kind not in _TOWERS or device.type != "cuda":
        return False
    width = getattr(config, "embed_dim", None) or config.hidden_size
    fits = dtype in (torch.bfloat16, torch.float16) and width // config.num_heads % _HEAD_DIM_STEP == 0
    return fits and (support.compute_capability(device) or 0) >= _LEAST_CAPABILITY


class _GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` with a single product for gate and up, and channels of zeros up to an aligned width."""

    def __init__(self, mlp: Any, act_mul: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        more = -gate.out_features % _WIDTH_STEP
        self.gate_up = _constant(torch.cat([F.pad(each.weight, (0, 0, 0, more)) for each in (gate, up)]))
        self.down = _constant(F.pad(down.weight, (0, more)))
        self.gate_up_bias, self.down_bias = None, down.bias
        if gate.bias is not None:
            self.gate_up_bias = _constant(torch.cat([F.pad(each.bias, (0, more)) for each in (gate, up)]))
        self._act_mul = act_mul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self._act_mul(F.linear(x, self.gate_up, self.gate_up_bias)), self.down, self.down_bias)


def _constant(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _embed(proj: nn.Conv3d, patches: torch.Tensor) -> torch.Tensor:
    """The convolution of a patch embedding, whose kernel covers a patch, as a product: ``[n, 3 * ...] -> [n, hidden]``."""
    return F.linear(patches, proj.weight.flatten(1), proj.bias)


def use_varlen(tower: Any) -> None:
    """Lets a tower compute its segments at once. Its calls then need ``geometry``."""
    tower.patch_embed.forward = functools.partial(_embed, tower.patch_embed.proj)
    for block in tower.blocks:
        block.attn.forward = functools.partial(_attend, block.attn)
        if hasattr(block.mlp, "gate_proj"):
            block.mlp = _GatedMLP(block.mlp, ACTIVATIONS[tower.config.hidden_act])
    for parent in list(tower.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                parent.register_module(name, _fused(norm))


def _fused(norm: Any) -> RMSNorm:
    fused = RMSNorm(len(norm.weight), norm.variance_epsilon, dtype=norm.weight.dtype, device="meta")
    fused.weight = norm.weight
    return fused


def geometry(tower: Any, grids: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of the tower's forward that follow from the grids ``[items, 3]``, which are on the host."""
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
    module: Any,
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    max_seqlen: int,
    **others: Any,
) -> torch.Tensor:
    """The forward of an attention, ``[T, hidden] -> [T, hidden]``, called as transformers does."""
    tokens = len(hidden_states)
    qkv = module.qkv(hidden_states).view(tokens, 3, module.num_heads, -1)
    rotate_heads(qkv[:, :2].flatten(1, 2), *position_embeddings)
    query, key, value = qkv.unbind(1)
    out = flash_segments(query, key, value, cu_seqlens, max_seqlen, module.scaling)
    projected: torch.Tensor = module.proj(out.reshape(tokens, -1))
    return projected
