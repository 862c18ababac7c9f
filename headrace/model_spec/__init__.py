"""Geometry of a model, layer by layer. No tensors."""

from headrace.model_spec.arena import Arena
from headrace.model_spec.attention import AttentionSpec, MLASpec, Mode
from headrace.model_spec.elastic import BLOCK_SPARSE, DENSE, ELASTIC_MODES, HEAD_TYPES, POOLED, STREAMING, ElasticSpec, HeadMode
from headrace.model_spec.indexer import IndexerSpec
from headrace.model_spec.kv import CacheGroup, LayerKV, Plane, block_sizes, cache_groups, layer_kv
from headrace.model_spec.mlp import CLAMPED_SWIGLU, DenseSpec, MlpSpec, MoeSpec
from headrace.model_spec.model import AnySpec, BlockSpec, ForeignSpec, ModelFacts, ModelSpec, Shard
from headrace.model_spec.rope import RopeSpec
from headrace.model_spec.states import ConvSpec, StateGroup, StatePlane, StateSpec
from headrace.model_spec.vision import VisionSpec

__all__ = [
    "AnySpec",
    "Arena",
    "CLAMPED_SWIGLU",
    "AttentionSpec",
    "BlockSpec",
    "CacheGroup",
    "ConvSpec",
    "DENSE",
    "DenseSpec",
    "ELASTIC_MODES",
    "ElasticSpec",
    "ForeignSpec",
    "HEAD_TYPES",
    "HeadMode",
    "IndexerSpec",
    "MLASpec",
    "LayerKV",
    "MlpSpec",
    "Mode",
    "ModelFacts",
    "ModelSpec",
    "MoeSpec",
    "POOLED",
    "Plane",
    "RopeSpec",
    "StateGroup",
    "StatePlane",
    "StateSpec",
    "VisionSpec",
    "BLOCK_SPARSE",
    "STREAMING",
    "Shard",
    "block_sizes",
    "cache_groups",
    "layer_kv",
]
