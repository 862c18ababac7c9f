"""Sparse prefill over a paged cache: which blocks of keys a block of queries needs, and attention to these alone.

Rows of a step are sequences; their queries are the last tokens of their keys. A row's queries are cut into blocks of ``block``
from its first query on, and its keys into blocks from position 0 on. Query blocks of all rows stand in one axis of
``N = T // block + R`` places: those of row r begin at ``query_start[r] // block + r``. Places of no block hold zeros.

A row with heads of type ``BLOCK_SPARSE`` begins its queries at a multiple of ``block``. Chunks of a prompt then come out as
the same rows of the whole prompt do, bit for bit, if every chunk but the prompt's last ends at a multiple too.

Selectors: XAttention (2503.16428) sums estimated attention along anti-diagonals and keeps the blocks with most of it
(``estimate``, ``select``); FlashPrefill V2 (2608.19758) scores blocks by their mean key (``block_means``, ``select_mean``)
and adds an approximation of the blocks that it leaves out.

References here are in float64 for float64 queries, else in float32, and go block by block: memory stays small, and bits do
not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from headrace.model_spec import BLOCK_SPARSE, STREAMING

BLOCK = 128
"""Tokens of a block of queries and of a block of keys."""
ELSEWHERE = 2
"""Type of heads that another kernel attends for, beside the types of ``model_spec``."""


class PagedKV(NamedTuple):
    """Keys and values of a step's R rows in a paged cache."""

    keys: torch.Tensor
    """``[blocks, block_size, kv_heads, d]``"""
    values: torch.Tensor
    """``[blocks, block_size, kv_heads, dv]``"""
    block_tables: torch.Tensor
    """``[R, B]`` int32"""
    k_scale: torch.Tensor | None = None
    """``[blocks, block_size, kv_heads]`` float32, like ``v_scale``, for keys and values in e4m3."""
    v_scale: torch.Tensor | None = None


class PromptRows(NamedTuple):
    """A step's R rows, and how they are cut."""

    query_start: torch.Tensor
    """``[R + 1]`` int32: first token of each row in the packed batch."""
    seq_lens: torch.Tensor
    """``[R]`` int32: tokens of each row in the cache, this step's included."""
    types: torch.Tensor
    """``[R, num_heads]`` int8"""
    max_seq_len: int
    """Upper bound of ``seq_lens``."""
    block: int = BLOCK

    @property
    def width(self) -> int:
        """``Kb``, the number of key blocks."""
        return -(-self.max_seq_len // self.block)


class BlockMeans(NamedTuple):
    """Means of each block of keys, and of its values."""

    keys: torch.Tensor
    """``[R, kv_heads, Kb, d]``"""
    values: torch.Tensor
    """``[R, kv_heads, Kb, dv]``"""


class KeyCopies(NamedTuple):
    """Keys and values of all rows out of their blocks, one token after another."""

    rows: torch.Tensor
    """``[keys, kv_heads, d + dv]``: a head's key, then its value; there may be room behind the last key."""
    start: torch.Tensor
    """``[R]`` int32: where each row's first key is."""


def num_query_blocks(num_tokens: int, num_rows: int, block: int = BLOCK) -> int:
    """Places of the axis of query blocks."""
    return num_tokens // block + num_rows


def first_query_blocks(query_start: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """``[R + 1]`` -> ``[R]``: the place of each row's first query block."""
    starts = query_start[:-1]
    return starts // block + torch.arange(len(starts), dtype=starts.dtype, device=starts.device)


def estimate(
    q: torch.Tensor, kv: PagedKV, rows: PromptRows, *, scale: float, stride: int = 16, norm: float = 1.0
) -> torch.Tensor:
    """XAttention's estimate of the attention that each block of keys gets from each block of queries.

    Tokens are taken in groups of ``stride``. The score of query group a and key group b is the mean of ``q . k * scale`` over
    one anti-diagonal of pairs, ``q[a S + S - 1 - t] . k[b S + t]``, divided by ``norm``; a softmax goes over the groups
    ``b <= a``, and its shares are added up by blocks. Tokens behind the last are zeros.

    Args:
        q: ``[T, num_heads, d]``, after the rotary embedding.
        rows: only heads of type ``BLOCK_SPARSE`` are estimated.
        scale: of attention's scores, as a rule ``d ** -0.5``.
        stride: a power of two that divides the block.

    Returns:
        ``[N, num_heads, Kb]`` float32 (float64 for float64 queries); 0 for other heads.
    """
    (num_heads, head_dim), block = q.shape[1:], rows.block
    group = num_heads // kv.keys.shape[2]
    per_block = block // stride
    dtype = _wide(q)
    sums = q.new_zeros(num_query_blocks(len(q), len(rows.seq_lens), block), num_heads, rows.width, dtype=dtype)
    for row, place, start, end, context in _rows(rows):
        wanted = (rows.types[row] == BLOCK_SPARSE).nonzero().flatten().tolist()
        length = context + end - start
        first_group = context // stride
        for kv_head in sorted({head // group for head in wanted}):
            heads = [head for head in wanted if head // group == kv_head]
            k = _gather(kv.keys, kv.k_scale, kv.block_tables[row], length, kv_head, dtype)
            k = _padded(k, stride).view(-1, stride * head_dim)
            for number, low in enumerate(range(start, end, block)):
                queries = q[low : min(low + block, end)][:, heads].to(dtype)
                queries = _padded(queries, stride).view(-1, stride, len(heads), head_dim).flip(1)
                queries = queries.permute(2, 0, 1, 3).reshape(len(heads), -1, stride * head_dim)
                group_of_query = first_group + number * per_block + torch.arange(queries.shape[1], device=q.device)
                seen = min(first_group + number * per_block + queries.shape[1], len(k))
                scores = queries.flatten(0, 1) @ k[:seen].T * (scale / (stride * norm))
                scores = scores.view(len(heads), -1, seen)
                scores.masked_fill_(torch.arange(seen, device=q.device) > group_of_query[:, None], -torch.inf)
                shares = scores.softmax(-1).sum(1)
                shares = torch.nn.functional.pad(shares, (0, -seen % per_block))
                by_block = shares.view(len(heads), -1, per_block).sum(-1)
                sums[place + number, heads, : by_block.shape[1]] = by_block
    return sums


def select(
    sums: torch.Tensor, rows: PromptRows, *, threshold: float | torch.Tensor, prompt_lens: torch.Tensor | None = None
) -> torch.Tensor:
    """Key blocks that make up ``threshold`` of a query block's estimated attention.

    The first block and the query block's own are kept. Others before it follow, the largest first and of equal ones the
    first, each while what is kept is below ``threshold`` times the total. From threshold 1 on all blocks are kept.

    Sums are rounded to multiples of ``2 ** -27``: added up as integers they do not depend on an order.

    Args:
        sums: ``[N, num_heads, Kb]``, as ``estimate`` returns them.
        threshold: for all heads, or ``[num_heads]`` float32.
        prompt_lens: ``[R]`` int32, of the whole prompts, to select as the code published with XAttention does: for query blocks
            of a prompt's first chunk, whose size depends on its length, block 0 competes with the others, and one more of
            these is kept. None: all query blocks are alike.

    Returns:
        ``[N, num_heads, Kb]`` bool; False for other heads than of type ``BLOCK_SPARSE``.
    """
    num_heads, num_blocks = sums.shape[1:]
    mask = torch.zeros(sums.shape, dtype=torch.bool, device=sums.device)
    thresholds = torch.as_tensor(threshold, dtype=torch.float32, device=sums.device).expand(num_heads).double()
    key_block = torch.arange(num_blocks, device=sums.device)
    block = rows.block
    for row, place, start, end, context in _rows(rows):
        heads = (rows.types[row] == BLOCK_SPARSE).nonzero().flatten()
        lagging_blocks = 0 if prompt_lens is None else upstream_chunk(int(prompt_lens[row])) // block
        for number in range(-(-(end - start) // block) if len(heads) else 0):
            own = context // block + number
            weights = _integers(sums[place + number, heads]) * (key_block <= own)
            total = weights.sum(-1)
            need = (thresholds[heads] * total).ceil().long()
            lagging = own < lagging_blocks
            competing = (key_block < own) & (key_block >= (0 if lagging else 1))
            kept = weights[:, own] if lagging or not own else weights[:, 0] + weights[:, own]
            ranked, order = torch.where(competing, weights, -1).sort(dim=-1, descending=True, stable=True)
            before = kept[:, None] + ranked.cumsum(-1) - ranked
            if lagging:
                before = torch.cat((torch.zeros_like(before[:, :1]), before[:, :-1]), dim=-1)
            taken = (before < need[:, None]) & (ranked >= 0)
            chosen = torch.zeros_like(taken).scatter_(1, order, taken)
            chosen |= (key_block == 0) | (key_block == own)
            everything = (thresholds[heads] >= 1) & (total > 0)
            mask[place + number, heads] = chosen | (everything[:, None] & (key_block <= own))
    return mask


def upstream_chunk(length: int) -> int:
    """Tokens of the chunks in which the code published with XAttention takes a prompt."""
    padded = 1 << (length - 1).bit_length()
    return max(min(max(2048, padded), 2**28 // padded), 2048)


def _integers(sums: torch.Tensor) -> torch.Tensor:
    """Rounds to units of ``2 ** -27``."""
    return (sums * 2.0**27 + 0.5).floor().long()


def block_means(q: torch.Tensor, kv: PagedKV, rows: PromptRows) -> BlockMeans:
    """Means of keys and of values over each row's blocks of ``block`` tokens; the last block's over the tokens it has.

    Args:
        q: the queries, of whose dtype the means are.

    Returns:
        ``[R, kv_heads, Kb, d]`` and ``[R, kv_heads, Kb, dv]``; 0 behind a row's last block.
    """
    keys, values, block_tables, k_scale, v_scale = kv
    kv_heads = keys.shape[2]
    means = BlockMeans(*(q.new_zeros(len(rows.seq_lens), kv_heads, rows.width, side.shape[3]) for side in (keys, values)))
    for row, length in enumerate(rows.seq_lens.tolist()):
        for kv_head in range(kv_heads if length else 0):
            for out, side, scales in zip(means, (keys, values), (k_scale, v_scale), strict=True):
                x = _gather(side, scales, block_tables[row], length, kv_head, _wide(out))
                for number, low in enumerate(range(0, length, rows.block)):
                    part = x[low : low + rows.block]
                    out[row, kv_head, number] = part.sum(0) / len(part)
    return means


def select_mean(
    q: torch.Tensor,
    key_means: torch.Tensor,
    rows: PromptRows,
    *,
    scale: float,
    alpha: float = 0.1,
    sink_blocks: int = 2,
    local_blocks: int = 4,
) -> torch.Tensor:
    """Key blocks by their mean key: those whose score is at least ``alpha`` times the largest one of the query block.

    A block's score is the sum of ``exp(scale * q . mean)`` over the query block's queries. Blocks before the query block's own
    compete; it, the blocks next to it and the first ones are kept in any case.

    Args:
        q: ``[T, num_heads, d]``, after the rotary embedding.
        key_means: ``[R, kv_heads, Kb, d]``, as ``block_means`` returns them.
        sink_blocks: first blocks that are kept.
        local_blocks: nearest blocks that are kept, the query block's own included: at least 1.

    Returns:
        ``[N, num_heads, Kb]`` bool; False for other heads than of type ``BLOCK_SPARSE``.
    """
    num_heads, block = q.shape[1], rows.block
    kv_heads, num_blocks = key_means.shape[1:3]
    group = num_heads // kv_heads
    dtype = _wide(q)
    places = num_query_blocks(len(q), len(rows.seq_lens), block)
    mask = torch.zeros(places, num_heads, num_blocks, dtype=torch.bool, device=q.device)
    key_block = torch.arange(num_blocks, device=q.device)
    for row, place, start, end, context in _rows(rows):
        for head in (rows.types[row] == BLOCK_SPARSE).nonzero().flatten().tolist():
            k = key_means[row, head // group].to(dtype)
            for number, low in enumerate(range(start, end, block)):
                own = context // block + number
                kept = (key_block < sink_blocks) | (key_block > own - local_blocks)
                if own:
                    logits = q[low : min(low + block, end), head].to(dtype) @ k[:own].T * scale
                    scores = logits.logsumexp(0)
                    kept[:own] |= scores >= scores.max() + math.log(alpha)
                mask[place + number, head] = kept & (key_block <= own)
    return mask


def sparse_prefill_attention(
    q: torch.Tensor,
    kv: PagedKV,
    rows: PromptRows,
    mask: torch.Tensor | None,
    *,
    scale: float,
    sink_blocks: int,
    local_blocks: int,
    means: BlockMeans | None = None,
    copies: KeyCopies | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention in which each head of each row attends by its type.

    ``DENSE``: to all keys. ``BLOCK_SPARSE``: to the key blocks of the mask. ``STREAMING``: to the first ``sink_blocks`` blocks
    and to ``local_blocks`` blocks up to number ``ceil(context / block) + m`` for the row's query block m, where the context is
    the keys before the row's first query: with a context of whole blocks, the query block's own and those before it.
    ``ELSEWHERE``: their output is not written.

    Args:
        q: ``[T, num_heads, d]``, after the rotary embedding.
        rows: tokens of none come out as 0, or keep their values in ``out``.
        mask: ``[N, num_heads, Kb]`` bool, as ``select`` or ``select_mean`` returns it; None: no head is ``BLOCK_SPARSE``.
        means: blocks that a ``BLOCK_SPARSE`` head leaves out, before the query block's own, count as if each of their tokens
            had the block's mean key and mean value. None: they do not count.
        copies: what ``kv`` holds, whose keys and values then are not read.
        out: ``[T, num_heads, dv]``, of q's dtype, contiguous: gets the result.

    Returns:
        ``[T, num_heads, dv]`` in q's dtype; 0 for a token that sees no key.
    """
    keys, values, block_tables, k_scale, v_scale = kv
    group, block = q.shape[1] // keys.shape[2], rows.block
    dtype = _wide(q)
    if out is None:
        out = q.new_zeros(*q.shape[:2], values.shape[3])
    for row, place, start, end, context in _rows(rows):
        length = context + end - start
        for head, kind in enumerate(rows.types[row].tolist()):
            if head % group == 0:
                if copies is None:
                    k = _gather(keys, k_scale, block_tables[row], length, head // group, dtype)
                    v = _gather(values, v_scale, block_tables[row], length, head // group, dtype)
                else:
                    both = copies.rows[int(copies.start[row]) :][:length, head // group].to(dtype)
                    k, v = both[:, : keys.shape[3]].contiguous(), both[:, keys.shape[3] :].contiguous()
            if kind == ELSEWHERE:
                continue
            for number, low in enumerate(range(start, end, block)):
                high = min(low + block, end)
                position = torch.arange(context + low - start, context + high - start, device=q.device)
                key_block = torch.arange(1 + (context + high - start - 1) // block, device=q.device)
                chosen = torch.ones_like(key_block, dtype=torch.bool)
                extra = None
                if kind == STREAMING:
                    nearest = -(-context // block) + number
                    chosen = (key_block < sink_blocks) | ((key_block > nearest - local_blocks) & (key_block <= nearest))
                elif kind == BLOCK_SPARSE:
                    if mask is None:
                        raise ValueError(f"head {head} of row {row} is block-sparse, but there is no mask")
                    chosen = mask[place + number, head, : len(key_block)]
                    if means is not None:
                        left_out = (~chosen[: context // block + number]).nonzero().flatten()
                        extra = BlockMeans(*(side[row, head // group, left_out].to(dtype) for side in means))
                out[low:high, head] = _attend(q[low:high, head].to(dtype), k, v, position, chosen, scale, block, extra)
    return out


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    chosen: torch.Tensor,
    scale: float,
    block: int,
    extra: BlockMeans | None,
) -> torch.Tensor:
    """One head's attention to the chosen blocks of its keys, and to means that each stand for ``block`` tokens."""
    key = (chosen.nonzero() * block + torch.arange(block, device=q.device)).flatten()
    key = key[key <= position[-1]]
    logits = (q @ k[key].T * scale).masked_fill(key > position[:, None], -torch.inf)
    v = v[key]
    if extra is not None:
        logits = torch.cat((logits, q @ extra.keys.T * scale + math.log(block)), dim=1)
        v = torch.cat((v, extra.values))
    sees_none = (logits == -torch.inf).all(dim=1, keepdim=True)
    return logits.softmax(1).masked_fill(sees_none, 0.0) @ v


def _wide(x: torch.Tensor) -> torch.dtype:
    """The type that references compute in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rows(rows: PromptRows) -> Iterator[tuple[int, int, int, int, int]]:
    """Rows with queries: number, place of the first query block, first token and the token behind the last, context."""
    starts = rows.query_start.tolist()
    for row, length in enumerate(rows.seq_lens.tolist()):
        start, end = starts[row : row + 2]
        if start < end <= start + length:
            yield row, start // rows.block + row, start, end, length - (end - start)


def _gather(
    side: torch.Tensor, scale: torch.Tensor | None, table: torch.Tensor, length: int, kv_head: int, dtype: torch.dtype
) -> torch.Tensor:
    """A KV head's first ``length`` keys or values ``[length, width]``, contiguous."""
    blocks = table[: -(-length // side.shape[1])].long()
    gathered = side[blocks, :, kv_head].flatten(0, 1)[:length].to(dtype)
    if scale is not None:
        gathered = gathered * scale[blocks, :, kv_head].flatten()[:length, None].to(dtype)
    return gathered.contiguous()


def _padded(x: torch.Tensor, stride: int) -> torch.Tensor:
    """Pads with zeros to a multiple of ``stride`` along the first axis."""
    missing = -len(x) % stride
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x
