"""Routing of attention heads by a prompt's keys (Elastic Attention, arXiv 2601.17367): pooling and router.

A router decides for every KV head of a layer whether it is a retrieval head (class 1) or a sparse head (class 0) for this
prompt. ``ElasticSpec`` says how heads of each class attend.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch.nn.functional import linear, silu


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


def pool_keys(keys: torch.Tensor, key_start: torch.Tensor) -> torch.Tensor:
    """Mean of each sequence's keys, which stand one sequence after another.

    Args:
        keys: ``[P, kv_heads, d]``: of each sequence the first ``POOLED`` and as many of the last, after the key norm and
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
