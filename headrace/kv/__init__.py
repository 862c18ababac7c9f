"""Who owns which KV block. No tensors."""

from headrace.kv.block_pool import NULL_BLOCK, BlockPool
from headrace.kv.manager import KVCacheManager, SequenceBlocks
from headrace.kv.prefix_cache import Hit

__all__ = ["NULL_BLOCK", "BlockPool", "Hit", "KVCacheManager", "SequenceBlocks"]
