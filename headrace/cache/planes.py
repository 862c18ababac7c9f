"""Allocating the KV cache and writing to it."""

from __future__ import annotations

import math

import numpy as np
import torch

from headrace.cache.fp8 import Fp8LayerCache, check_alignment
from headrace.cache.layer import LayerCache
from headrace.config import CacheConfig
from headrace.errors import ConfigError
from headrace.kernels import gpu
from headrace.kernels.kv_cache import reshape_and_cache
from headrace.model_spec import AttentionSpec, ModelFacts, layer_kv
from headrace.model_spec.kv import DTYPE_BYTES, FP8_KV


def allocate(config: CacheConfig, model: ModelFacts, device: str | torch.device, dtype: str | torch.dtype) -> list[LayerCache]:
    """Zeroed: ``config.nbytes`` in all. A layer that reads another's KV has that one's tensor.

    With one cache group each layer has a separate tensor. Several groups, of which the states may be one, share one run of
    bytes, in which a block has the KV of all layers of its group, one layer after the other: the layers' tensors are views
    of it, block by block at a stride of the group's, and those of different groups overlap.

    Zeros, because a masked position still meets the softmax's zero in a product, and zero times garbage may be NaN. FP8
    caches that share bytes cannot be kept so: a scale's bytes, read as e4m3, may be NaN. They are ``dirty``.

    Raises:
        ConfigError: dtype is not the one the config accounts for, or ``block_size`` leaves an FP8 layer's bytes unaligned.
    """
    name = str(dtype).removeprefix("torch.")
    if name != config.dtype or name not in DTYPE_BYTES:
        raise ConfigError(f"the KV cache was sized for {config.dtype}, not for {name}", "dtype")
    group_of = {layer: group.index for group in config.groups for layer in group.layers}
    rows, index_keys = _views(config, model, device)
    caches: list[LayerCache] = []
    for spec in model.layers:
        kept = spec.layer if spec.kv_source is None else spec.kv_source
        if name == FP8_KV:
            caches.append(Fp8LayerCache(spec, group_of[kept], rows[kept], tokens=config.block_size, dirty=config.shared))
        else:
            caches.append(LayerCache(spec, group_of[kept], rows[kept], index_keys.get(spec.layer)))
    return caches


def _views(
    config: CacheConfig, model: ModelFacts, device: str | torch.device
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """``rows`` by layer, of those that keep KV, and ``index_keys``, of those that keep any."""
    dtype = torch.uint8 if config.dtype == FP8_KV else getattr(torch, config.dtype)
    arena = None
    if config.shared:
        arena = _zeros((config.nbytes,), torch.uint8, device)
        arena = arena[: config.nbytes - config.nbytes % dtype.itemsize].view(dtype)
    rows, index_keys = {}, {}
    for group in config.groups:
        block_bytes, num_blocks = config.arena.block_bytes[group.index], config.num_blocks[group.index]

        def view(shape: tuple[int, ...], offset: int, block: int = block_bytes, count: int = num_blocks) -> torch.Tensor:
            """The ``shape`` of a layer in all blocks, ``offset`` numbers behind the beginning of each."""
            if arena is None:
                return _zeros((count, *shape), dtype, device)
            strides = (block // dtype.itemsize, *(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))
            return arena.as_strided((count, *shape), strides, offset)

        for layer, offset in zip(group.layers, group.layer_offsets(config.block_size), strict=True):
            spec = model.layers[layer]
            shape, start = _block_shape(spec, config), offset // dtype.itemsize
            rows[layer] = view(shape, start)
            if spec.indexer is not None and spec.indexer.width:
                index_keys[layer] = view((config.block_size, spec.indexer.width), start + math.prod(shape))
    return rows, index_keys


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Makes a tensor of zeros. On the CPU the system zeros its memory when first touched: gigabytes of zeros cost a start-up
    seconds."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(dtype).view(shape)


def _block_shape(spec: AttentionSpec, config: CacheConfig) -> tuple[int, ...]:
    """Returns the shape of a block of ``rows``."""
    if config.dtype == FP8_KV:
        check_alignment(spec, config.block_size)
        return (config.block_size * layer_kv(spec, FP8_KV).bytes_per_token,)
    return config.block_size, spec.num_kv_heads, spec.row_width


def write(cache: LayerCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes each token's K and V to its slot; slot -1 writes nothing.

    Args:
        k: ``[T, num_kv_heads, head_dim]``
        v: ``[T, num_kv_heads, v_head_dim]``
        slot_mapping: ``[T]`` int64: ``block * block_size + offset``.
    """
    if cache.k_scale is not None or gpu.takes(k):
        reshape_and_cache(k, v, cache.keys, cache.values, slot_mapping, cache.k_scale, cache.v_scale)
        return
    kept = slot_mapping >= 0
    slots, size = slot_mapping[kept], cache.block_size
    cache.rows[slots // size, slots % size] = torch.cat((k, v), dim=-1)[kept]


def write_mla(cache: LayerCache, row: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """``write`` of compressed KV: ``row [T, 1, row_width]``."""
    rotated = cache.spec.rotary_dim
    if gpu.takes(row) and rotated:
        rows = cache.rows
        reshape_and_cache(row[..., :rotated], row[..., rotated:], rows[..., :rotated], rows[..., rotated:], slot_mapping)
        return
    kept = slot_mapping >= 0
    slots, size = slot_mapping[kept], cache.block_size
    cache.rows[slots // size, slots % size] = row[kept]


def write_index_keys(cache: LayerCache, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes each token's index key, ``keys [T, width]``, to its slot; slot -1 writes nothing.

    Raises:
        ValueError: the layer keeps no index keys.
    """
    if cache.index_keys is None:
        raise ValueError(f"layer {cache.spec.layer} keeps no index keys")
    rows, half = cache.index_keys.unsqueeze(2), keys.shape[1] // 2
    if gpu.takes(keys):
        first, second = keys[:, None, :half], keys[:, None, half:]
        reshape_and_cache(first, second, rows[..., :half], rows[..., half:], slot_mapping)
        return
    kept = slot_mapping >= 0
    slots, size = slot_mapping[kept], cache.block_size
    cache.index_keys[slots // size, slots % size] = keys[kept]
