"""Ownership of KV blocks and the prefix cache. No tensors."""

from headrace.kv.block_pool import NULL_BLOCK, BlockPool
from headrace.kv.blocks import SequenceBlocks
from headrace.kv.identity import CacheIdentity, Item, SparseIdentity
from headrace.kv.manager import KVCacheManager, NewBlocks
from headrace.kv.prefix_cache import Hit
from headrace.kv.rows import TokenRows
from headrace.kv.states import StateOp

__all__ = [
    "NULL_BLOCK",
    "BlockPool",
    "CacheIdentity",
    "Hit",
    "Item",
    "KVCacheManager",
    "NewBlocks",
    "SequenceBlocks",
    "SparseIdentity",
    "StateOp",
    "TokenRows",
]
