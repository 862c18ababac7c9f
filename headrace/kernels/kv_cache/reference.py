"""Writing to a paged KV cache, plain or in FP8, and copying pages out again.

FP8 is dynamic, with one scale a token and head: ``scale = max(absmax / 448, 1e-12)``, ``stored = e4m3(x / scale)``. 448
is the largest number of e4m3 (Micikevicius et al., "FP8 formats for deep learning", 2022). NaN is stored in the scale
alone: cached values are finite, so that 0 times them is 0.
"""

from __future__ import annotations

import torch

FP8_MAX = 448.0
FP8_MIN_SCALE = 1e-12
FP8 = torch.float8_e4m3fn


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Scatters new keys and values into the cache, quantised where there are scales.

    Args:
        key: ``[T, kv_heads, d]``, float32, bfloat16 or float16.
        value: ``[T, kv_heads, dv]``
        key_cache: ``[blocks, block_size, kv_heads, d]`` of any strides: storage of ``[blocks, kv_heads, block_size, d]``
            is passed as its ``transpose(1, 2)``.
        value_cache: ``[blocks, block_size, kv_heads, dv]`` of any strides.
        slot_mapping: ``[T]`` int64, ``block * block_size + offset``; -1 writes nothing.
        k_scale, v_scale: ``[blocks, block_size, kv_heads]`` float32 of the same strides, for a cache in e4m3.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    place = (slots // key_cache.shape[1], slots % key_cache.shape[1])
    for new, cache, scales in ((key[kept], key_cache, k_scale), (value[kept], value_cache, v_scale)):
        if scales is None:
            cache[place] = new.to(cache.dtype)
            continue
        quantised, scale = quantize(new)
        cache.view(torch.uint8)[place] = quantised.view(torch.uint8)
        scales[place] = scale


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., width]`` -> e4m3 numbers of the same shape, and a float32 scale for each of ``[...]``."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / FP8_MAX).clamp(min=FP8_MIN_SCALE)
    return (wide / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).nan_to_num(0.0).to(FP8), scale


def dequantize(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``[..., width]`` e4m3 and ``[...]`` float32 -> float32."""
    return stored.float() * scale.unsqueeze(-1)


def gather_numbers(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    pages: torch.Tensor,
    first: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Copies tokens of an FP8 cache out of their blocks, dequantised.

    Args:
        key_cache: ``[blocks, block_size, kv_heads, d]`` e4m3 of any strides.
        value_cache: ``[blocks, block_size, kv_heads, dv]`` e4m3 of any strides.
        k_scale, v_scale: ``[blocks, block_size, kv_heads]`` float32, of the same strides.
        pages: ``[P]`` int32: a block.
        first: ``[P]`` int64: where its first token goes in ``out``.
        count: ``[P]`` int32: how many of its tokens go there.
        out: ``[tokens, kv_heads, d + dv]`` contiguous: a head's key, then its value. Other entries are kept.
    """
    token = torch.arange(key_cache.shape[1], device=pages.device)
    there = token < count.unsqueeze(1)
    places = (first.unsqueeze(1) + token)[there]
    sides = ((key_cache, k_scale), (value_cache, v_scale))
    chosen = [dequantize(side[pages.long()][there], scale[pages.long()][there]) for side, scale in sides]
    out[places] = torch.cat(chosen, dim=-1).to(out.dtype)
