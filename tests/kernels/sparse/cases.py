"""Problems of sparse prefill over a paged cache, and its functions as the papers write them: loops over queries and groups."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

from headrace.kernels.kv_cache import dequantize, quantize
from headrace.kernels.sparse import BLOCK, KeyCopies, PagedKV, PromptRows

Rows = Sequence[tuple[int, int]]
"""(queries, tokens in the cache)"""


@dataclasses.dataclass
class Problem:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    types: torch.Tensor
    scales: dict[str, torch.Tensor]

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max()) if len(self.seq_lens) else 1

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.keys.shape[2]

    @property
    def cache(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.keys, self.values, self.tables, self.query_start, self.seq_lens, self.types

    @property
    def kv(self) -> PagedKV:
        return PagedKV(self.keys, self.values, self.tables, **self.scales)

    def rows(self, block: int = BLOCK) -> PromptRows:
        return PromptRows(self.query_start, self.seq_lens, self.types, self.max_seq_len, block)

    def copies(self) -> KeyCopies:
        """Keys and values out of their blocks, a row's behind NaN and before NaN."""
        sides = []
        for row, length in enumerate(self.seq_lens.tolist()):
            place = torch.arange(length, device=self.q.device)
            block, offset = self.tables[row].long()[place // self.keys.shape[1]], place % self.keys.shape[1]
            of_row = [
                dequantize(side[block, offset], self.scales[name][block, offset]) if self.scales else side[block, offset]
                for side, name in ((self.keys, "k_scale"), (self.values, "v_scale"))
            ]
            sides.append(torch.nn.functional.pad(torch.cat(of_row, dim=-1), (0, 0, 0, 0, 1, 0), value=torch.nan))
        starts = 1 + torch.cumsum(self.seq_lens + 1, 0) - (self.seq_lens + 1)
        return KeyCopies(torch.cat(sides).to(self.q.dtype).contiguous(), starts.int())

    def to(self, device: torch.device) -> Problem:
        return Problem(
            *(moved(part, device) for part in self.cache), {name: moved(part, device) for name, part in self.scales.items()}
        )

    def sequence(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A row's queries ``[L, H, d]``, and its keys and values for query heads ``[n, H, width]``, in float64."""
        length = int(self.seq_lens[row])
        block = torch.tensor([int(self.tables[row, p // self.keys.shape[1]]) for p in range(length)], dtype=torch.int64)
        offset = torch.arange(length) % self.keys.shape[1]
        sides = []
        for side, name in ((self.keys, "k_scale"), (self.values, "v_scale")):
            x = side[block, offset]
            x = dequantize(x, self.scales[name][block, offset]) if self.scales else x
            sides.append(x.double().repeat_interleave(self.group, dim=1))
        start, end = self.query_start[row : row + 2].tolist()
        return self.q[start:end].double(), sides[0], sides[1]


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy elsewhere, of the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def problem(
    rows: Rows,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    types: Sequence[int] = (1,),
    fp8: bool = False,
    size: float = 1.0,
    seed: int = 0,
) -> Problem:
    """Rows in shuffled blocks; what no row may see is NaN (e4m3: 448), also in the null block.

    Args:
        types: of the heads of each row, repeated.
        size: of queries, so that scores are as far apart as is wanted.
    """
    generator = torch.Generator().manual_seed(seed)
    v_head_dim = v_head_dim or head_dim
    needed = [-(-length // block_size) for _, length in rows]
    count = 1 + sum(needed)
    shape = (count, block_size, kv_heads)
    keys, values = (torch.randn(*shape, width, generator=generator) for width in (head_dim, v_head_dim))
    order = (1 + torch.randperm(count - 1, generator=generator)).tolist()
    tables = torch.zeros(len(rows), max(needed) + 1, dtype=torch.int32)
    hidden = torch.ones(count, block_size, dtype=torch.bool)
    for row, (_, length) in enumerate(rows):
        for column in range(needed[row]):
            tables[row, column] = block = order.pop()
            hidden[block, : length - column * block_size] = False
    scales = {}
    if fp8:
        (keys, k_scale), (values, v_scale) = quantize(keys), quantize(values)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        keys.view(torch.uint8)[hidden] = values.view(torch.uint8)[hidden] = 0x7E
        k_scale[hidden] = v_scale[hidden] = torch.nan
        # As an FP8 cache has them: values by channel, so that those of a block's tokens lie side by side.
        values = values.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    else:
        both = torch.cat((keys, values), dim=-1).to(dtype)
        both[hidden] = torch.nan
        keys, values = both[..., :head_dim], both[..., head_dim:]
    total = sum(queries for queries, _ in rows)
    q = (torch.randn(total, heads, head_dim, generator=generator) * size).to(dtype)
    starts = torch.tensor([0, *itertools.accumulate(queries for queries, _ in rows)], dtype=torch.int32)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    kinds = torch.tensor(list(itertools.islice(itertools.cycle(types), len(rows) * heads)), dtype=torch.int8)
    return Problem(q, keys, values, tables, starts, lengths, kinds.view(len(rows), heads), scales)


def estimate(q: torch.Tensor, k: torch.Tensor, scale: float, stride: int, norm: float, block: int) -> torch.Tensor:
    """``[Qb, Kb]`` of a whole prompt of one head, ``q`` and ``k`` ``[T, d]``."""
    length = len(q)
    groups = -(-length // stride)
    sums = torch.zeros(-(-length // block), -(-length // block), dtype=torch.float64)
    for a in range(groups):
        scores = []
        for b in range(a + 1):
            score = 0.0
            for t in range(stride):
                query, key = a * stride + stride - 1 - t, b * stride + t
                if query < length and key < length:
                    score += float(q[query] @ k[key])
            scores.append(score * scale / (stride * norm))
        highest = max(scores)
        shares = [math.exp(score - highest) for score in scores]
        for b, share in enumerate(shares):
            sums[a * stride // block, b * stride // block] += share / sum(shares)
    return sums


def select(sums: torch.Tensor, own: int, threshold: float) -> set[int]:
    """Key blocks of query block ``own``, whose sums are given."""
    if threshold >= 1 and float(sums.sum()) > 0:
        return set(range(own + 1))
    need = threshold * float(sums[: own + 1].sum())
    forced = {0, own}
    kept = sum(float(sums[j]) for j in forced)
    for j in sorted(set(range(own)) - forced, key=lambda j: (-float(sums[j]), j)):
        if kept < need:
            forced.add(j)
            kept += float(sums[j])
    return forced


def select_upstream(sums: torch.Tensor, own: int, threshold: float) -> set[int]:
    """The same in the first chunk of the published code: every test lags one pick, and block 0 competes."""
    need = threshold * float(sums[: own + 1].sum())
    chosen = {own, 0}
    before = [0.0, float(sums[own])]
    for pick, j in enumerate(sorted(range(own), key=lambda j: (-float(sums[j]), j))):
        if before[pick] < need:
            chosen.add(j)
        before.append(before[-1] + float(sums[j]))
    return chosen


def visible(position: int, context: int, kind: int, chosen: set[int], sink: int, local: int, block: int) -> list[int]:
    """Keys that the query at a position sees."""
    number = (position - context) // block
    end = -(-context // block) + 1 + number
    near = {*range(end - local, end), *range(sink)}
    blocks = {0: None, 1: chosen, -1: near}[kind]
    return [key for key in range(position + 1) if blocks is None or key // block in blocks]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: list[int],
    scale: float,
    means: list[tuple[torch.Tensor, ...]],
    block: int,
) -> torch.Tensor:
    """One query's: ``q [d]``, ``k [n, d]``, ``v [n, dv]``; each of the means stands for as many tokens as a block has."""
    weights = [math.exp(float(q @ k[key]) * scale) for key in seen]
    weights += [block * math.exp(float(q @ mean[0]) * scale) for mean in means]
    taken = [v[key] for key in seen] + [mean[1] for mean in means]
    if not weights:
        return torch.zeros_like(v[0])
    return sum(weight / sum(weights) * value for weight, value in zip(weights, taken, strict=True))
