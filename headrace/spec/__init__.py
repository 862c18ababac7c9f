"""Geometry of a model, layer by layer. No tensors."""

from headrace.spec.arena import Arena
from headrace.spec.attention import AttentionSpec, LatentSpec, Mode
from headrace.spec.kv import CacheGroup, LayerKV, Plane, block_sizes, cache_groups, layer_kv
from headrace.spec.mlp import CLAMPED_SWIGLU, DenseSpec, MlpSpec, MoeSpec
from headrace.spec.model import ModelSpec, Span
from headrace.spec.rope import RopeSpec

__all__ = [
    "Arena",
    "CLAMPED_SWIGLU",
    "AttentionSpec",
    "CacheGroup",
    "DenseSpec",
    "LatentSpec",
    "LayerKV",
    "MlpSpec",
    "Mode",
    "ModelSpec",
    "MoeSpec",
    "Plane",
    "RopeSpec",
    "Span",
    "block_sizes",
    "cache_groups",
    "layer_kv",
]
