"""Geometry of a model, layer by layer. No tensors."""

from headrace.spec.arena import Arena
from headrace.spec.attention import AttentionSpec, LatentSpec, Mode
from headrace.spec.foreign import AnySpec, ForeignSpec
from headrace.spec.kv import CacheGroup, LayerKV, Plane, block_sizes, cache_groups, layer_kv
from headrace.spec.mlp import CLAMPED_SWIGLU, DenseSpec, MlpSpec, MoeSpec
from headrace.spec.model import ModelFacts, ModelSpec, Span
from headrace.spec.rope import RopeSpec

__all__ = [
    "AnySpec",
    "Arena",
    "CLAMPED_SWIGLU",
    "AttentionSpec",
    "CacheGroup",
    "DenseSpec",
    "ForeignSpec",
    "LatentSpec",
    "LayerKV",
    "MlpSpec",
    "Mode",
    "ModelFacts",
    "ModelSpec",
    "MoeSpec",
    "Plane",
    "RopeSpec",
    "Span",
    "block_sizes",
    "cache_groups",
    "layer_kv",
]
