"""Paged attention problems of any geometry, with their metadata."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import torch

from headrace.attention.backend import AttentionInputs, StepMetadata
from headrace.cache.fp8 import Fp8LayerCache
from headrace.cache.layer import LayerCache
from headrace.kernels.kv_cache import dequantize, reshape_and_cache
from headrace.model_spec import AttentionSpec, CacheGroup, layer_kv
from headrace.model_spec.kv import FP8_KV


def layer_spec(**changes: object) -> AttentionSpec:
    values: dict = {"layer": 0, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16, "scale": 0.25}
    return AttentionSpec(**{**values, **changes})


@dataclasses.dataclass
class Case:
    q: torch.Tensor
    cache: LayerCache
    step: StepMetadata
    sinks: torch.Tensor | None

    @property
    def inputs(self) -> AttentionInputs:
        return AttentionInputs(self.q, self.cache, self.sinks, self.step.visible_ends)


def make_case(
    spec: AttentionSpec,
    rows: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 4,
    seed: int = 0,
    wide: int = 0,
    extra_tokens: int = 0,
) -> Case:
    """Rows of (query tokens, tokens in the cache with them), in random blocks.

    Whatever no row owns is NaN, but for the null block; blocks behind a row's window are given back.

    Args:
        wide: columns of zeros at the end of the block table.
        extra_tokens: tokens behind the last row's that belong to none.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for _, length in rows]
    num_blocks = 1 + sum(needed) + 3
    shape = (num_blocks, block_size, spec.num_kv_heads, spec.row_width)
    # Other layers' KV lies between the blocks of one, as in an arena that cache groups share.
    between = 24 * (seed % 2)
    arena = torch.full((num_blocks, math.prod(shape[1:]) + between), torch.nan, dtype=dtype)
    cache = arena[:, between:].unflatten(1, shape[1:])
    cache[0] = 0
    free = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    table = torch.zeros(len(rows), max([*needed, 1]) + wide, dtype=torch.int32)
    for row, (count, length) in enumerate(rows):
        passed = CacheGroup(0, spec.window, (0,), 1, chunked=spec.chunked).first_seen(length - count) // block_size
        for column in range(passed, needed[row]):
            table[row, column] = block = free.pop()
            filled = min(block_size, length - column * block_size)
            cache[block] = 0
            cache[block, :filled] = torch.randn(filled, *shape[2:], generator=generator).to(dtype)
    starts = np.concatenate(([0], np.cumsum([count for count, _ in rows]))).astype(np.int32)
    lengths = np.array([length for _, length in rows], dtype=np.int32)
    total = int(starts[-1]) + extra_tokens
    step = StepMetadata(
        num_decode_rows=sum(count == 1 for count, _ in rows),
        query_start=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lengths),
        slot_mapping=(),
        block_tables=(table,),
        query_start_host=starts,
        seq_lens_host=lengths,
    )
    q = torch.randn(total, spec.num_heads, spec.q_size // spec.num_heads, generator=generator).to(dtype)
    sinks = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None
    return Case(q, LayerCache(spec, 0, cache), step, sinks)


def with_ends(case: Case, spans: list[tuple[int, int, int]]) -> Case:
    """The case with spans (row, first position, end) whose tokens see each other, as far as they are in the step."""
    starts, lengths = case.step.query_start_host, case.step.seq_lens_host
    ends = torch.zeros(len(case.q), dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        positions = range(length - int(starts[row + 1] - starts[row]), length)
        for token, position in enumerate(positions, int(starts[row])):
            around = [end for place, first, end in spans if place == row and first <= position < end]
            ends[token] = max([position + 1, *around])
    return dataclasses.replace(case, step=dataclasses.replace(case.step, visible_ends=ends))


class Placed(NamedTuple):
    """A step's rows among those of a captured one, which has room for more: decode rows first, then prompts'."""

    places: np.ndarray
    """Row -> its place."""
    starts: np.ndarray
    """Place -> its first token, ``[places + 1]``; a padding decode row has a token too."""
    lengths: np.ndarray
    """Place -> tokens of its sequence; 0: a padding row."""
    index: np.ndarray
    """The step's tokens among those of the captured one."""


def placed(step: StepMetadata, decodes: int, rows: int) -> Placed:
    """Places the step's rows in a captured step of ``rows`` rows, of which ``decodes`` are decode rows."""
    places = np.arange(len(step.seq_lens_host))
    places[step.num_decode_rows :] += decodes - step.num_decode_rows
    counts = np.zeros(rows, dtype=np.int64)
    counts[:decodes] = 1
    counts[places] = np.diff(step.query_start_host)
    starts = np.concatenate(([0], np.cumsum(counts)))
    lengths = np.zeros(rows, dtype=np.int64)
    lengths[places] = step.seq_lens_host
    return Placed(places, starts, lengths, np.concatenate([np.arange(starts[place], starts[place + 1]) for place in places]))


def in_fp8(plain: LayerCache) -> tuple[LayerCache, LayerCache]:
    """The same keys and values in FP8, and their dequantised values. Unowned blocks are 0."""
    plain.rows.nan_to_num_(0.0)
    tokens = plain.block_size
    size = tokens * layer_kv(plain.spec, FP8_KV).bytes_per_token
    stored = Fp8LayerCache(plain.spec, 0, torch.zeros(len(plain.rows), size, dtype=torch.uint8), tokens=tokens)
    slots = torch.arange(plain.rows[..., 0, 0].numel())
    keys, values = plain.keys.flatten(0, 1), plain.values.flatten(0, 1)
    reshape_and_cache(keys, values, stored.keys, stored.values, slots, stored.k_scale, stored.v_scale)
    sides = ((stored.keys, stored.k_scale), (stored.values, stored.v_scale))
    restored = torch.cat([dequantize(side, scale) for side, scale in sides], dim=-1)
    return stored, LayerCache(plain.spec, 0, restored.to(plain.rows.dtype))
