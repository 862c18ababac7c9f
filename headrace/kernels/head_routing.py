"""Routing of attention heads by a prompt's keys (Elastic Attention, arXiv 2601.17367): pooling, router, head types.

A router decides for every KV head of a layer whether it is a retrieval head (class 1) or a sparse head (class 0) for this
prompt. Two settings of the checkpoint say how heads of each class attend.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch.nn.functional import linear, silu

from headrace.errors import ConfigError
from headrace.kernels import gpu

POOLED = 100
"""Tokens of a prompt's head, and as many of its tail, whose keys the router sees."""

DENSE, BLOCK_SPARSE, STREAMING = 0, 1, -1
"""Head types: all keys; the key blocks of a mask; the first and the nearest key blocks."""
ELSEWHERE = 2
"""Of heads that another kernel attends for."""

HEAD_TYPES = {
    ("full", "xattn"): (DENSE, BLOCK_SPARSE),
    ("full", "streaming"): (DENSE, STREAMING),
    ("xattn", "streaming"): (BLOCK_SPARSE, STREAMING),
    ("xattn", "xattn"): (BLOCK_SPARSE, BLOCK_SPARSE),
    ("full", "full"): (DENSE, DENSE),
}
"""(retrieval_mode, toggle_type) -> the types of heads of class 1 and of class 0."""


class RouterWeights(NamedTuple):
    """Weights of a layer's router, all of one dtype: two MLPs, shared by the KV heads, of ``[out, in]`` linear maps.

    ``d`` is the head dimension, ``w`` the width inside, ``4 d`` in the published checkpoints.
    """

    features_in: torch.Tensor
    """``cls_feat_extractor.0``: ``[w, d]``"""
    features_in_bias: torch.Tensor
    features_out: torch.Tensor
    """``cls_feat_extractor.2``: ``[d, w]``"""
    features_out_bias: torch.Tensor
    router_in: torch.Tensor
    """``cls_router_head_agnostic.0``: ``[w, d]``"""
    router_in_bias: torch.Tensor
    router_hidden: torch.Tensor
    """``cls_router_head_agnostic.2``: ``[d, w]``"""
    router_hidden_bias: torch.Tensor
    router_out: torch.Tensor
    """``cls_router_head_agnostic.4``: ``[2, d]``"""
    router_out_bias: torch.Tensor


@gpu.dispatch("head_routing.pool_keys")
def pool_keys(keys: torch.Tensor, key_start: torch.Tensor) -> torch.Tensor:
    """Mean of each sequence's keys, which stand one sequence after another.

    Args:
        keys: ``[P, kv_heads, d]``: of each sequence the first ``POOLED`` and the last ones, after the key norm and
            before the rotary embedding. The last axis is contiguous.
        key_start: ``[R + 1]`` int32: first key of each sequence.

    Returns:
        ``[R, kv_heads, d]`` float32 (float64 for float64 keys); 0 for a sequence without keys.
    """
    wide = keys if keys.dtype == torch.float64 else keys.float()
    pooled = wide.new_zeros(len(key_start) - 1, *keys.shape[1:])
    starts = key_start.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        if end > start:
            pooled[row] = wide[start:end].sum(0) / (end - start)
    return pooled


@gpu.dispatch("head_routing.route")
def route(pooled: torch.Tensor, weights: RouterWeights) -> torch.Tensor:
    """Class of each KV head, in float32 (float64 for float64 ``pooled``).

    Args:
        pooled: ``[R, kv_heads, d]``, contiguous, as ``pool_keys`` returns it.

    Returns:
        ``[R, kv_heads]`` int8: 1 for a retrieval head, 0 for a sparse head, and where both logits are alike.
    """
    logits = router_logits_ref(pooled, weights)
    return (logits[..., 1] > logits[..., 0]).to(torch.int8)


def router_logits_ref(pooled: torch.Tensor, weights: RouterWeights) -> torch.Tensor:
    """``[R, kv_heads, d]`` -> ``[R, kv_heads, 2]``, each head by itself: a product's bits may depend on its number of rows."""
    w = RouterWeights(*(part.to(pooled.dtype) for part in weights))
    logits = pooled.new_empty(*pooled.shape[:2], 2)
    for row, heads in enumerate(pooled):
        for head, x in enumerate(heads):
            features = linear(silu(linear(x, w.features_in, w.features_in_bias)), w.features_out, w.features_out_bias)
            hidden = silu(linear(features, w.router_in, w.router_in_bias))
            hidden = silu(linear(hidden, w.router_hidden, w.router_hidden_bias))
            logits[row, head] = linear(hidden, w.router_out, w.router_out_bias)
    return logits


def class_types(retrieval_mode: str, toggle_type: str) -> tuple[int, int]:
    """Types of heads of class 1 and of class 0.

    Raises:
        ConfigError: there is no such pair of modes.
    """
    types = HEAD_TYPES.get((retrieval_mode, toggle_type))
    if types is None:
        pairs = ", ".join(f"{retrieval}/{toggle}" for retrieval, toggle in HEAD_TYPES)
        raise ConfigError(
            f"retrieval_mode {retrieval_mode!r} with toggle_type {toggle_type!r} is not supported: there are {pairs}",
            "retrieval_mode",
        )
    return types


def head_types(classes: torch.Tensor, retrieval_mode: str, toggle_type: str, group: int) -> torch.Tensor:
    """Types of query heads: those of one KV head stand side by side and are alike.

    Args:
        classes: ``[R, kv_heads]`` int8, as ``route`` returns it.
        group: query heads of a KV head.

    Returns:
        ``[R, kv_heads * group]`` int8: ``DENSE``, ``BLOCK_SPARSE`` or ``STREAMING``.

    Raises:
        ConfigError: there is no such pair of modes.
    """
    retrieval, sparse = class_types(retrieval_mode, toggle_type)
    types = sparse + (retrieval - sparse) * classes
    return types.to(torch.int8).repeat_interleave(group, dim=1)
