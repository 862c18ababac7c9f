"""Geometry of a model, layer by layer. No tensors."""

from headrace.spec.attention import AttentionSpec, Mode
from headrace.spec.kv import CacheGroup, LayerKV, Plane, cache_groups, layer_kv
from headrace.spec.mlp import DenseSpec, MlpSpec
from headrace.spec.model import ModelSpec, Span
from headrace.spec.rope import RopeSpec

__all__ = [
    "AttentionSpec",
    "CacheGroup",
    "DenseSpec",
    "LayerKV",
    "MlpSpec",
    "Mode",
    "ModelSpec",
    "Plane",
    "RopeSpec",
    "Span",
    "cache_groups",
    "layer_kv",
]
