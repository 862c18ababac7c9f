"""Geometry of a model, layer by layer. No tensors."""

from headrace.spec.attention import AttentionSpec, Mode
from headrace.spec.kv import CacheGroup, LayerKV, Plane, cache_groups, layer_kv
from headrace.spec.model import ModelSpec, RopeSpec, Span

__all__ = [
    "AttentionSpec",
    "CacheGroup",
    "LayerKV",
    "Mode",
    "ModelSpec",
    "Plane",
    "RopeSpec",
    "Span",
    "cache_groups",
    "layer_kv",
]
